"""What `/openapi.json` says of requests is what the server takes."""

import copy
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.tieredkv import documented_anthropic, documented_openai
from tests.tieredkv.test_unknown_values import UNKNOWN, body_of, requests_of
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.asked import Rules
from tieredkv.server.description import ANSWERED, describe

DOCUMENT = describe()
RULES = Rules(Settings())
PATHS = {
    "/v1/chat/completions": documented_openai.CHATS,
    "/v1/responses": documented_openai.RESPONSES,
    "/v1/messages": documented_anthropic.MESSAGES,
}
EXAMPLES = [
    *((path, example.body) for path, examples in PATHS.items() for example in examples),
    *((path, body_of(path, body)) for path, body, *_ in UNKNOWN),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": "x", "logit_bias": {"5": 1}}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", {"tokens": [1]}),
]


def faults(path: str, body: dict[str, Any]) -> list[str]:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": DOCUMENT["components"]}
    return [str(each.message) for each in Draft202012Validator(whole).iter_errors(body)]


def is_taken(path: str, body: dict[str, Any]) -> bool:
    try:
        read(ANSWERED[path], copy.deepcopy(body), RULES.refuses)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=[it[0] for it in EXAMPLES])
def test_what_is_taken_is_described(path: str, body: dict[str, Any]) -> None:
    body = {"model": "m", **body}
    assert is_taken(path, body)
    assert faults(path, body) == []


@pytest.mark.parametrize("arguments", ['{"value": "', None, 5, [1], {"a": 1}])
def test_arguments_of_any_type_are_described(arguments: Any) -> None:
    for kind, body in requests_of(arguments):
        [path] = [path for path, each in ANSWERED.items() if each is kind]
        assert faults(path, {"model": "m", **body}) == []


@pytest.mark.parametrize("path", ANSWERED)
def test_every_field_that_may_be_left_out_may_be_null(path: str) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    needed = schema.get("required", [])
    example = next((body for other, body in EXAMPLES if other == path), {"messages": [], "x": 1})
    if path.startswith("/v1/messages/"):
        example = {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "m", **dict.fromkeys(schema["properties"].keys() - needed), **example}
    assert is_taken(path, body)
    assert faults(path, body) == []


@pytest.mark.parametrize("path", ANSWERED)
def test_no_field_is_described_that_is_refused(path: str) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    refused = {name for name, it in ANSWERED[path].refused.items() if not it.is_lenient}
    assert schema["properties"].keys() & refused == set()


def test_responses_describe_no_limit_of_another_endpoint() -> None:
    schema = DOCUMENT["paths"]["/v1/responses"]["post"]["requestBody"]["content"]
    names = schema["application/json"]["schema"]["properties"].keys()
    assert names & {"max_tokens", "max_completion_tokens", "n", "best_of"} == set()
    assert names >= {"max_output_tokens", "top_k", "min_p", "frequency_penalty"}


def test_a_default_is_the_one_that_is_used() -> None:
    def properties(path: str) -> Any:
        body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
        return body["application/json"]["schema"]["properties"]

    assert properties("/v1/completions")["max_tokens"]["default"] == 16
    # The checkpoint's own values are used where the client gives none.
    for path in ("/v1/messages", "/v1/chat/completions"):
        for name in ("temperature", "top_p", "top_k"):
            assert "default" not in properties(path)[name], (path, name)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_k": "x"}),
    ("/v1/responses", {"input": 5}),
    ("/v1/responses", {}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [5]}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": {"a": 1}}),
    ("/detokenize", {"tokens": ["a"]}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_what_is_wrong_is_not_described(path: str, body: dict[str, Any]) -> None:
    assert faults(path, {"model": "m", **body}) != []
