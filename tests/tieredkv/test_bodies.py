"""Bodies that are too costly to decode are refused, and harmless ones are not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import refused
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import parse_body, read, shape_of
from tieredkv.server.asked import Rules
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.openai_messages import UNREAD

USER = {"role": "user", "content": "hi"}


def chat(*messages: object, is_strict: bool = False, **fields: Any) -> ChatRequest:
    rules = Rules(Settings(), is_strict=is_strict)
    body = {"model": "m", "messages": [USER, *messages], **fields}
    asked = read(ChatRequest, body, rules.refuses)
    asked.check(rules)
    return asked


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[],{}," * 40_000 + b"1]}",
        b'{"a":[' + b"1," * 300_000 + b"1]}",
        b"{" + b",".join(b'"%d":1' % i for i in range(140_000)) + b"}",
    ],
    ids=["arrays", "values", "members"],
)
def test_a_body_that_holds_too_much_is_refused_before_it_is_decoded(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.fields.msgspec.json.decode", None)
    with refused(RequestError):
        parse_body(body)


def test_punctuation_in_strings_is_text() -> None:
    text = '[{,:"\\\\' * 50_000 + "\\"
    assert parse_body(json.dumps({"a": text}).encode()) == {"a": text}


JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text('"\\[]{},:a', max_size=6),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[:'), inner),
)


@given(value=JSON)
def test_the_shape_of_a_body_is_that_of_its_decoded_value(
    monkeypatch_module: pytest.MonkeyPatch, value: Any
) -> None:
    def count(value: Any) -> tuple[int, int, int]:
        items = [*value.values()] if isinstance(value, dict) else value
        if not isinstance(items, list):
            return 0, 0, 0
        inner = [count(each) for each in items]
        depth = max((each[0] for each in inner), default=0) + 1
        containers, keys = (sum(each[i] for each in inner) for i in (1, 2))
        return depth, containers + 1, keys + (len(items) if isinstance(value, dict) else 0)

    for separators in ((",", ":"), (" , ", " : ")):
        shape = shape_of(json.dumps(value, separators=separators).encode())
        assert shape[:3] == count(value)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    """Scan in steps so short that strings reach from one step into the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tieredkv.fields._SCAN_BYTES", 5)
        yield patch


def test_arguments_of_calls_are_counted_before_they_are_decoded() -> None:
    called = {"name": "f", "arguments": "[" + "[]," * 5000 + "1]"}
    call = {"id": "1", "type": "function", "function": called}
    asked = chat({"role": "assistant", "content": "", "tool_calls": [call]})
    assert asked.messages[1].tool_calls[0].function.arguments == {UNREAD: called["arguments"]}


def test_a_refusal_shortens_a_long_key_or_value() -> None:
    for fields in (
        {"k" * 10**6: 1},
        {"prompt_cache_retention": "v" * 10**6},
        {"metadata": {"k": {"v": 1}}},
    ):
        with pytest.raises(RequestError) as caught:
            chat(is_strict=True, **fields)
        assert len(str(caught.value)) < 600
        assert len(caught.value.param or "") <= 200


def test_only_names_that_are_not_known_are_asked_about_and_the_first_is_refused() -> None:
    asked_about = list[str]()

    def refuses(name: str) -> bool:
        asked_about.append(name)
        return name == "novel"

    talk = [USER | {"name": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    body = {"model": "m", "messages": talk, "temperature": 1, "seed": None}
    read(ChatRequest, body, refuses)
    assert asked_about == []
    read(ChatRequest, {**body, "later": 1}, refuses)
    assert asked_about == ["later"]
    with pytest.raises(RequestError) as caught:
        read(ChatRequest, {**body, "later": 1, "novel": 1, "suffix": "x"}, refuses)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "novel")


def test_a_body_is_read_without_being_changed() -> None:
    body: dict[str, Any] = {"model": "m", "seed": None, "messages": [USER | {"name": None}]}
    before = json.dumps(body)
    assert read(ChatRequest, body).seed is None
    assert json.dumps(body) == before
