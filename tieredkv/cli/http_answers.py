"""What a server's answers mean to a verb that asks it by its URL."""

import contextlib

import httpx

from tieredkv.errors import ServerUnreachableError


def reason_of(answer: httpx.Response) -> str:
    """Return what a server says is wrong."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(answer.json()["error"]["message"])
    return f"status {answer.status_code}"


def unreachable(url: str, error: BaseException) -> ServerUnreachableError:
    """Return the error that a server does not answer."""
    what = f"the server at `{url}` does not answer: {error or type(error).__name__}"
    return ServerUnreachableError(f"{what}\nhint: start a server, and give its URL without /v1")
