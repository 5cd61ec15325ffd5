"""Streamed text has whole characters only and nothing of a stop string."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, byte_tokenizer
from tieredkv.engine.detokenizer import Detokenizer

TEXT = "naïve café - 東京タワー 🗼👩‍👩‍👧 ends, مرحبا!"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(BYTE_VOCAB_SIZE, 1024)


@pytest.fixture(scope="module")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a sentencepiece-style tokenizer, as of Llama 2 and Mistral, with byte fallback."""
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.finish()]


def test_a_character_is_held_back_until_its_last_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert stream(detokenizer, encode(tokenizer, "a🗼b")) == ["a", "", "", "", "🗼", "b", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_pieces_of_a_stream_are_the_text(tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    ids = encode(tokenizer, TEXT)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*pieces, detokenizer.finish()]) == TEXT == detokenizer.text
    assert "\ufffd" not in "".join(pieces)


def test_a_text_that_continues_another_keeps_its_first_space(
    fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = [1, 2, 3, 2, 1]
    whole = str(fallback_tokenizer.decode(ids))
    assert whole == "the cats cat the"
    for at in range(len(ids) + 1):
        before = str(fallback_tokenizer.decode(ids[:at]))
        detokenizer = Detokenizer(fallback_tokenizer, before=ids[:at])
        assert before + "".join(stream(detokenizer, ids[at:])) == whole
    assert "".join(stream(Detokenizer(fallback_tokenizer), ids[1:])) == "cats cat the"


def test_an_unfinished_character_at_the_end_is_replaced(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert stream(detokenizer, encode(tokenizer, "a🗼")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_random_bytes_stream_to_what_they_decode_to_at_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random(7)
    for _ in range(50):
        ids = rng.choices(range(256), k=60)
        assert "".join(stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


def test_a_long_run_of_broken_bytes_is_not_held_for_ever(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = [0xFF] * 500 + encode(tokenizer, "東!")
    assert "".join(stream(detokenizer, ids)) == "\ufffd" * 500 + "東!"


def test_special_tokens_are_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*encode(tokenizer, "ab"), 259, *encode(tokenizer, "c")]
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "abc"


def test_words_keep_their_spaces_across_tokens(fallback_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [1, 2, 3, 1, 2] * 30
    assert "".join(stream(Detokenizer(fallback_tokenizer), ids)) == fallback_tokenizer.decode(ids)


def test_byte_fallback_tokens_wait_for_each_other(
    fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = [1, *(5 + byte for byte in "東".encode()), 2]
    assert stream(Detokenizer(fallback_tokenizer), ids) == ["the", "", "", "東", " cat", ""]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_is_found_across_token_borders(
    tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = encode(tokenizer, "one STOtwo STOP three")
    detokenizer = Detokenizer(tokenizer, stop=["STOP"])
    pieces = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) == detokenizer.text == "one STOtwo "
    assert detokenizer.stopped_by == "STOP"
    assert detokenizer.finish() == ""


def test_only_what_may_be_a_stop_string_is_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["</end>"])
    assert stream(detokenizer, encode(tokenizer, "a<<b</")) == ["a", "", "<", "<b", "", "", "</"]


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_stop_string_to_be_complete_counts(
    tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = encode(tokenizer, "xabcde")
    detokenizer = Detokenizer(tokenizer, stop=["abcd", "bc"])
    for i in range(0, len(ids), size):
        detokenizer.feed(ids[i : i + size])
    assert detokenizer.text == "xa"
    assert detokenizer.stopped_by == "bc"


def test_a_stop_string_of_many_bytes_is_found(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["🗼"])
    assert "".join(stream(detokenizer, encode(tokenizer, TEXT))) == TEXT[: TEXT.index("🗼")]


def test_stop_strings_wait_for_min_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["b"], min_tokens=4)
    assert "".join(stream(detokenizer, encode(tokenizer, "abcabc"))) == "abca"


def test_a_stop_string_in_the_held_back_end_is_found(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["\ufffd"])
    assert "".join(stream(detokenizer, encode(tokenizer, "a🗼")[:-1])) == "a"
    assert detokenizer.stopped_by == "\ufffd"
