"""Encoded piece by piece, from memory or not, a text has the ids that it has in one go."""

from bisect import bisect_right
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tieredkv.server import pieces
from tieredkv.server.pieces import PieceEncoder

LEARNT_FROM = [
    "the quick brown fox says: hello, user!",
    "assistant 12 345",
    "été \N{SNOWMAN} <| end",
] * 4
ADDED = {
    "llama": [
        AddedToken(name, special=True, normalized=False) for name in ("<|a|>", "<|a|>b", "</s>")
    ],
    "phi": [
        AddedToken("<|a|>", special=True, normalized=False, rstrip=True),
        AddedToken("\n\n", normalized=False),
    ],
    "left": [
        AddedToken("<|a|>", special=True, normalized=False),
        AddedToken("</s>", special=True, normalized=False, lstrip=True),
        AddedToken("fox", special=True, normalized=False, single_word=True),
        AddedToken("<|", normalized=True),
    ],
    "plain": [],
}
KINDS = {
    "byte level": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte level with a space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a space first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "spaces always": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "normalized": (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.NFC()]),
        pre_tokenizers.WhitespaceSplit(),
    ),
}


@cache
def tokenizer_of(kind: str, added: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(unk_token="?"))
    made.normalizer, made.pre_tokenizer = KINDS[kind]
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["?"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(LEARNT_FROM, trainer)
    made.add_tokens(ADDED[added])
    return PreTrainedTokenizerFast(tokenizer_object=made)  # type: ignore[no-untyped-call]


WORDS = st.sampled_from(
    [
        "<|a|>",
        "<|a|>b",
        "</s>",
        "fox",
        "<|",
        "|>",
        " ",
        "\n\n",
        "the quick",
        "user\n",
        "e\u0301",
        "\N{SNOWMAN}",
        "b",
        "_",
        "",
    ]
)
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=14).map("".join)


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_pieces_have_the_ids_of_the_whole_text(kind: str, added: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(kind, added)
    encoder = PieceEncoder(tokenizer)
    talk = "".join(texts)
    for text in [*texts, talk, talk + texts[0], talk]:
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        stops = [stop for _, stop in whole["offset_mapping"]]
        places = range(len(text) + 1)
        token_ids, ends = encoder.encode(text, places)
        assert token_ids == whole["input_ids"]
        if stops == sorted(stops):
            assert ends == [bisect_right(stops, place) for place in places]


def test_what_was_encoded_is_not_encoded_again_but_for_another_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = PieceEncoder(tokenizer_of("byte level", "llama"))
    encoded: list[str] = []

    class Backend:
        def encode_batch_fast(self, texts: list[str], **how: bool) -> object:
            encoded.extend(filter(None, texts))
            return backend.encode_batch_fast(texts, **how)

    backend, encoder._backend = encoder._backend, Backend()
    first, second = "<|a|>system the fox</s>\n<|a|>user hello</s>", "<|a|>assistant hey</s>"
    encoder.encode(first, namespace="one")
    encoded.clear()
    encoder.encode(first + second, namespace="one")
    assert encoded == ["<|a|>assistant hey"]
    encoded.clear()
    encoder.encode(first, namespace="other")
    assert "".join(encoded) == first
    monkeypatch.setattr(pieces, "MAX_CHARACTERS", 2 * pieces.PIECE_CHARACTERS + 20)
    for text in ("<|a|>1", "<|a|>2", "<|a|>3"):
        encoder.encode(text, namespace="small")
    encoded.clear()
    encoder.encode("<|a|>1<|a|>3", namespace="small")
    assert encoded == ["<|a|>1"]


def test_a_tokenizer_without_a_backend_encodes_in_one_go() -> None:
    class Slow:
        def encode(self, text: str, **_how: bool) -> list[int]:
            return list(text.encode())

    assert PieceEncoder(Slow()).encode("abc", [1, 3]) == ([97, 98, 99], [1, 3])  # type: ignore[arg-type]
