"""Random bodies made from the server's own OpenAPI description get an answer or a refusal."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import http
from tests.serving import Server, running
from tests.waiting import HANG_S

MODEL = "tiny-random"
NUM_BODIES = 120
LENGTH = 96
Strategy = st.SearchStrategy[Any]
MADE: dict[str, Strategy] = {}

ODD_TEXTS = ["", "\0", "in_memory", "24h", "\U0001f600", "a" * 200]
TEXTS = st.text(max_size=6) | st.sampled_from(ODD_TEXTS)
GOOD = {"prompt": "ab", "input": "ab", "messages": [{"role": "user", "content": "ab"}]}
JUNK: Strategy = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with a short context; it must end well and log no traceback."""
    with running(tmp_path_factory.mktemp("fuzz"), "--max-model-len", str(LENGTH)) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def description(server: Server) -> dict[str, Any]:
    """Return the OpenAPI description of the server."""
    document: dict[str, Any] = http.get(f"{server.root}/openapi.json").json()
    return document


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """Return a client of the server."""
    with httpx.Client(base_url=server.root, timeout=HANG_S) as client:
        yield client


def values(schema: dict[str, Any], known: dict[str, Any]) -> Strategy:
    """Return a strategy of mostly small values that a schema allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]  # schemas of content are recursive
        return MADE.setdefault(name, st.deferred(lambda: values(known[name], known)))
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return st.one_of([values(each, known) for each in schema[word]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "integer":
            least = max(schema.get("minimum", 0), 0)
            return st.integers(least, min(schema.get("maximum", 4), least + 4))
        case "number":
            return st.floats(schema.get("minimum", 0), schema.get("maximum", 2))
        case "string":
            least, most = schema.get("minLength", 0), min(schema.get("maxLength", 12), 12)
            return st.text(min_size=least, max_size=most)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(values(schema.get("items", {}), known), min_size=least, max_size=3)
        case "object":
            fields = {name: values(each, known) for name, each in of(schema).items()}
            needed = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=fields)
    return JUNK


def of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an object's schema."""
    fields: dict[str, Any] = schema.get("properties", {})
    return fields


def is_well_refused(path: str, answer: httpx.Response) -> bool:
    """Return whether a refusal has the form of its API and holds no traceback."""
    body = answer.json()
    error = body["error"]
    if path.startswith("/v1/messages"):
        return bool(body["type"] == "error" and error["type"] and error["message"])
    return set(error) == {"message", "type", "param", "code"} and "Traceback" not in answer.text


def check(path: str, answer: httpx.Response) -> None:
    """Fail unless the response is an answer or a well-formed refusal."""
    assert answer.status_code < 500, (path, answer.request.content[:500], answer.text)
    if answer.status_code != 200:
        assert is_well_refused(path, answer), (path, answer.text)


@settings(
    max_examples=NUM_BODIES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_no_body_makes_the_server_fail(
    data: Any, description: dict[str, Any], client: httpx.Client
) -> None:
    known = description["components"]["schemas"]
    path = data.draw(st.sampled_from(sorted(description["paths"])))
    operation = description["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(values(schema, known))
    body |= {"model": MODEL}
    body |= {"max_tokens": 2, "max_completion_tokens": 2} if data.draw(st.booleans()) else {}
    if data.draw(st.booleans()):  # the prompt is valid
        body |= {name: value for name, value in GOOD.items() if name in of(schema)}
    if data.draw(st.booleans()):
        body[data.draw(st.sampled_from(sorted(of(schema))))] = data.draw(JUNK)
    content = json.dumps(body, ensure_ascii=data.draw(st.booleans()))
    check(path, client.post(path, content=content.encode("utf-8", "replace")))


def test_the_description_has_every_path_that_takes_a_body(description: dict[str, Any]) -> None:
    assert {"/v1/completions", "/v1/chat/completions"} <= set(description["paths"])
    assert "CompletionRequest" in str(description) and description["openapi"] == "3.1.0"


@pytest.mark.parametrize("depth", [60, 1000, 100_000])
def test_deep_bodies_are_answered_or_refused(depth: int, client: httpx.Client) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        deep = opening * depth + "1" + closing * depth
        user = {"role": "user", "content": "a"}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
        tool = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}
        for path, body in (
            ("/v1/completions", {"prompt": "a", "metadata": "DEEP"}),
            ("/v1/completions", {"prompt": "DEEP"}),
            ("/v1/chat/completions", {"messages": [user], "tools": [tool]}),
            (
                "/v1/chat/completions",
                {"messages": [user, {"role": "assistant", "tool_calls": [call]}, user]},
            ),
            ("/v1/chat/completions", {"messages": [user], "chat_template_kwargs": {"a": "DEEP"}}),
        ):
            content = json.dumps({"model": MODEL, "max_tokens": 1, **body})
            check(path, client.post(path, content=content.replace('"DEEP"', deep)))


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b'{"model": "tiny-random", "prompt": "\xff"}', {}),
        ("{}".encode("utf-16"), {}),
        (b"", {}),
        (b"\0" * 100, {}),
        (b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}),
        (b"{}", {"content-type": "multipart/form-data; boundary="}),
        (b"\x1f\x8b\x08", {"content-encoding": "gzip"}),
        (b'{"model": "tiny-random", "model": 5}', {"content-type": "text/xml"}),
    ],
)
def test_a_body_that_is_not_json_is_refused(
    content: bytes, headers: dict[str, str], client: httpx.Client, description: dict[str, Any]
) -> None:
    for path in description["paths"]:
        answer = client.post(path, content=content, headers=headers)
        check(path, answer)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_bytes_that_are_not_http_are_refused_and_the_server_goes_on(
    sent: bytes, server: Server
) -> None:
    with socket.create_connection(("127.0.0.1", int(server.root.rpartition(":")[2]))) as sock:
        sock.sendall(sent)
        sock.settimeout(HANG_S)
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
    assert server.health().status_code == 200


@pytest.mark.slow
def test_a_body_that_does_not_arrive_times_out(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", int(server.root.rpartition(":")[2]))) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        sock.sendall(head + b"{")
        sock.settimeout(HANG_S)
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
