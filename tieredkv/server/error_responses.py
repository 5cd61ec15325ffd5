"""Errors as responses, in the form of the API that a request's path belongs to."""

from collections.abc import Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tieredkv.errors import MAX_TOLD_CHARACTERS, RequestError
from tieredkv.server.anthropic_answers import STATUS, anthropic_body
from tieredkv.server.description import ANSWERED
from tieredkv.server.generation import ClientGoneError
from tieredkv.server.limits import CLIENT_CLOSED_REQUEST
from tieredkv.server.openai_answers import openai_body

GONE = (ClientDisconnect, ClientGoneError)

_HTTP_ERRORS = {
    404: ("Unknown request URL: {} {}.{}", "unknown_url"),
    405: ("Not allowed to {} on {}.{}", "method_not_supported"),
}
_ENDPOINTS = tuple(path.removeprefix("/v1") for path in (*ANSWERED, "/v1/models"))
_BASE_URLS = (
    " The base URL of OpenAI's clients ends with /v1, and that of Anthropic's clients before it."
)


async def refuse(request: Request, error: Exception) -> Response:
    """Return an error in the form of the API that the request's path belongs to.

    The client is not told the details of an unexpected error; its traceback is in the log.
    """
    headers: Mapping[str, str] | None = None
    match error:
        case ClientDisconnect() | ClientGoneError():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case RequestError(status=401):
            headers = {"WWW-Authenticate": "Bearer"}
        case RequestError(status=429 | 503):
            headers = {"Retry-After": str(error.retry_after_s)}
        case RequestError():
            pass
        case HTTPException(status_code=status, headers=headers):
            text, code = _HTTP_ERRORS.get(status, (str(error.detail), None))
            path = request.scope["path"]
            hint = _BASE_URLS if status == 404 and path.endswith(_ENDPOINTS) else ""
            text = text.format(request.method, path[:MAX_TOLD_CHARACTERS], hint)
            error = RequestError(text, code=code, status=status)
        case _:
            text = "The server had an error while processing your request."
            error = RequestError(text, status=500)
    if "/v1/messages" not in request.scope["path"]:
        return JSONResponse(openai_body(error), error.status, headers)
    body = anthropic_body(error, request.scope["request_id"])
    return JSONResponse(body, STATUS.get(error.status, error.status), headers)


def unknown_model(name: str, served: Sequence[str]) -> RequestError:
    """Return the error for a model that is not served, which names those that are."""
    names = " and ".join(f"`{each}`" for each in served)
    what = f"The model `{name[:MAX_TOLD_CHARACTERS]}` does not exist"
    text = f"{what} or you do not have access to it. This server serves {names}."
    return RequestError(text, param="model", code="model_not_found", status=404)
