"""The request type of each path that is answered, and the OpenAPI document that describes them."""

import functools
from typing import Any

import msgspec
from pydantic import TypeAdapter

from tieredkv import __version__
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.fields import nullable
from tieredkv.server import anthropic_api as anthropic
from tieredkv.server.asked import ApiRequest, Json
from tieredkv.server.openai_api import (
    SAMPLING_FIELDS,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
)
from tieredkv.server.responses_api import InputTokensRequest, ResponsesRequest
from tieredkv.server.tokenize_requests import DetokenizeRequest, TokenizeRequest

ANSWERED: dict[str, type[ApiRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""The type of the body that each path takes by `POST`."""


@functools.cache
def description() -> bytes:
    """Return the OpenAPI document as JSON; it is the same for every server."""
    return msgspec.json.encode(describe())


def describe() -> Json:
    """Return the OpenAPI document of the `POST` routes, made from their request types."""
    schemas: Json = {}
    paths: Json = {}
    for path, kind in ANSWERED.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        if issubclass(kind, OpenAIRequest):
            _add_sampling(kind, schema["properties"])
        content = {"application/json": {"schema": schema}}
        answers = {
            "200": {"description": "The response."},
            "4XX": {"description": "An error, in the form of the API that the path belongs to."},
        }
        operation = {"requestBody": {"required": True, "content": content}}
        paths[path] = {"post": {**operation, "responses": answers}}
    about = {"title": "tieredkv", "version": __version__}
    about["description"] = "A field that is `null` is the same as one that is not there."
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}


def _add_sampling(kind: type[OpenAIRequest], properties: dict[str, Any]) -> None:
    """Add the sampling fields that a request takes beside its own."""
    fields = TypeAdapter(SamplingParams).json_schema()["properties"]
    own = properties.keys() - {"temperature"}
    names = SAMPLING_FIELDS - own - kind.refused.keys()
    properties |= {name: nullable(fields[name]) for name in sorted(names)}
    if "max_tokens" in properties and kind.default_tokens == CompletionRequest.default_tokens:
        properties["max_tokens"]["default"] = kind.default_tokens
