"""A description of the API for tools, made from the types that check the requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute, Route

from tieredkv import __version__

_REFERENCE = "#/components/schemas/{model}"


def describe(routes: Sequence[BaseRoute], kinds: Mapping[Any, type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of those routes whose request bodies are of some kind.

    Args:
        routes: of the application.
        kinds: by endpoint.
    """
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route) and route.endpoint in kinds:
            schema = kinds[route.endpoint].model_json_schema(ref_template=_REFERENCE)
            schemas |= schema.pop("$defs", {})
            content = {"application/json": {"schema": schema}}
            answers = {"200": {"description": "the answer"}, "4XX": {"description": "why not"}}
            operation = {"requestBody": {"required": True, "content": content}}
            paths[route.path] = {"post": {**operation, "responses": answers}}
    about = {"title": "tieredkv", "version": __version__}
    components = {"schemas": schemas}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": components}
