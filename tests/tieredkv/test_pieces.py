"""A text encoded in pieces, remembered or not, has the same ids as when encoded whole."""

import contextlib
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
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
from tieredkv.server.pieces import PieceEncoder, TooLongError, Trie
from tieredkv.server.threads import Cancellation, CancelledWorkError

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
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_pieces_have_the_ids_of_the_whole_text(kind: str, added: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(kind, added)
    encoder = PieceEncoder(tokenizer)
    talk = "".join(texts)
    for text in [*texts, talk, talk + texts[0], talk]:
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        stops = [stop for _, stop in whole["offset_mapping"]]
        places = range(len(text) + 1)
        encoding = encoder.encode(text)
        assert encoding.ids == whole["input_ids"]
        if stops == sorted(stops):
            assert encoding.ends(places) == [bisect_right(stops, place) for place in places]


@contextlib.contextmanager
def short_chunks() -> Iterator[None]:
    """Shrink the sizes so that texts are cut after a few words."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("CHUNK", 16), ("BATCH", 40), ("WINDOW", 24), ("SCAN", 7)):
            patch.setattr(pieces, f"{name}_CHARACTERS", size)
        yield


NAMES = ["the", "quick", "brown", "fox", "says", "user", "\u00e9t\u00e9", "345", "\n\n\n", "a"]
PROSE = st.lists(st.sampled_from(NAMES) | WORDS | st.text(max_size=3), min_size=8, max_size=40).map(
    " ".join
)


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=PROSE)
def test_a_piece_that_was_cut_has_the_ids_of_the_whole(kind: str, added: str, text: str) -> None:
    tokenizer = tokenizer_of(kind, added)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = range(len(text) + 1)
    with short_chunks():
        encoding = PieceEncoder(tokenizer).encode(text)
        ends = encoding.ends(places)
    assert encoding.ids == whole["input_ids"]
    stops = [stop for _, stop in whole["offset_mapping"]]
    if stops == sorted(stops):
        assert ends == [bisect_right(stops, place) for place in places]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "normalized"])
def test_long_prose_is_cut(kind: str) -> None:
    text = "the quick brown fox says hello user " * 20
    with short_chunks():
        assert len([*PieceEncoder(tokenizer_of(kind, "llama"))._backend.chunks(text)]) > 20


def test_encoding_stops_once_there_are_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, encoded = PieceEncoder(tokenizer_of("byte level", "llama")), 0
    encode = encoder._backend.ids

    def ids(texts: list[str]) -> object:
        nonlocal encoded
        encoded += sum(map(len, texts))
        return encode(texts)

    monkeypatch.setattr(encoder._backend, "ids", ids)
    for text in ("the fox " * 200_000, "<|a|>the fox " * 200_000, "x" * 2_000_000):
        encoded = 0
        with pytest.raises(TooLongError):
            encoder.encode(text, limit=1000)
        assert encoded < len(text) / 4
        short = text[:3000]
        assert encoder.encode(short, limit=3000).ids == encoder.encode(short).ids


def test_encoding_stops_where_nobody_waits_for_it() -> None:
    cancellation = Cancellation()
    cancellation.set()
    with pytest.raises(CancelledWorkError):
        PieceEncoder(tokenizer_of("byte level", "llama")).encode("a", cancellation=cancellation)


@given(
    texts=st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=6),
    text=st.text("ab<|", max_size=40),
)
def test_a_trie_finds_what_the_longest_alternative_first_does(texts: list[str], text: str) -> None:
    longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
    plain = re.compile("|".join(sorted(longest_first, key=len, reverse=True)) or "(?!)")
    with short_chunks():
        found = [*Trie(texts).find(text)]
    assert found == [match.span() for match in plain.finditer(text) if match[0] in texts]


def test_remembered_pieces_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PieceEncoder(tokenizer_of("byte level", "llama"))
    monkeypatch.setattr(pieces, "MAX_CHARACTERS_IN_ALL", 10 * pieces.PIECE_CHARACTERS)
    for i in range(100):
        encoder.encode("<|a|>the fox<|a|>user", namespace=i)
    assert sum(map(len, encoder._kept.values())) < 10
    encoder.encode("".join(f"<|a|>{i}" for i in range(50_000)), namespace="many")
    assert sum(map(len, encoder._kept.values())) < 10


def test_a_piece_is_encoded_once_per_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PieceEncoder(tokenizer_of("byte level", "llama"))
    encoded: list[str] = []

    class Backend:
        def encode_batch_fast(self, texts: list[str], **how: bool) -> object:
            encoded.extend(filter(None, texts))
            return backend.encode_batch_fast(texts, **how)

    backend = encoder._backend._backend
    monkeypatch.setattr(encoder._backend, "_backend", Backend())
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

    encoding = PieceEncoder(Slow()).encode("abc")  # type: ignore[arg-type]
    assert (encoding.ids, encoding.ends([1, 3])) == ([97, 98, 99], [1, 3])
