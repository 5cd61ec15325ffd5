"""Errors in the form of each API."""

from typing import Any

from tieredkv.errors import RequestError

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; others below 500 are the request's fault, those above are the server's."""


def openai_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an answer that is an error; its `type` goes with the status."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}


def anthropic_body(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """Return the same in Anthropic's form; `request_id` is that of the answer's header.

    That form has no place for the field at fault, so that the message names it.
    """
    is_named = error.param is None or error.param in str(error)
    text = str(error) if is_named else f"{error.param}: {error}"
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told = {"type": _ANTHROPIC_TYPES.get(error.status, other), "message": text}
    return {"type": "error", "error": told, "request_id": request_id}
