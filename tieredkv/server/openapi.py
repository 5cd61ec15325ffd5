"""A description of the API for tools, made from the types that check the requests."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tieredkv import __version__

_REFERENCE = "#/components/schemas/{model}"


def describe(kinds: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of what is posted.

    Args:
        kinds: what the bodies are, by path.
    """
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, kind in kinds.items():
        schema = kind.model_json_schema(ref_template=_REFERENCE)
        schemas |= schema.pop("$defs", {})
        content = {"application/json": {"schema": schema}}
        answers = {"200": {"description": "the answer"}, "4XX": {"description": "why not"}}
        operation = {"requestBody": {"required": True, "content": content}}
        paths[path] = {"post": {**operation, "responses": answers}}
    about = {"title": "tieredkv", "version": __version__}
    components = {"schemas": schemas}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": components}
