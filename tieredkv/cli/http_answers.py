"""How a verb asks a server by its URL, and what the server's answers mean to it."""

import contextlib

import click
import httpx

from tieredkv.errors import ServerUnreachableError
from tieredkv.http_clients import http_client, is_loopback


def admin_client(url: str, admin_key: str | None, timeout: httpx.Timeout | float) -> httpx.Client:
    """Return a client for a server's verbs, open until the command ends.

    Args:
        url: of the server, without the path of an API.
        admin_key: of the server; None if it has none.
        timeout: after which a server that says nothing is given up.

    Raises:
        ServerUnreachableError: the URL cannot be parsed.
    """
    warn_if_key_is_readable(url, admin_key)
    headers = {b"Authorization": b"Bearer " + admin_key.encode()} if admin_key else {}
    try:
        http = http_client(url, headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise unreachable(url, error) from None
    return click.get_current_context().with_resource(http)


def reason_of(answer: httpx.Response) -> str:
    """Return what a server says is wrong."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(answer.json()["error"]["message"])
    return f"status {answer.status_code}"


def code_of(answer: httpx.Response) -> str | None:
    """Return the code of what a server says is wrong; None if it says none."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(answer.json()["error"]["code"])
    return None


def warn_if_key_is_readable(url: str, key: str | None) -> None:
    """Warn of a key that is sent without encryption to another machine."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return
    if key and parsed.scheme == "http" and not is_loopback(parsed.host):
        what = f"the key is sent to `{parsed.host}` over plain HTTP, so others may read it"
        click.echo(f"warning: {what}\nhint: use https, or a tunnel to this machine", err=True)


def unreachable(url: str, error: BaseException) -> ServerUnreachableError:
    """Return the error that a server does not answer."""
    what = f"the server at `{url}` does not answer: {error or type(error).__name__}"
    return ServerUnreachableError(f"{what}\nhint: start a server, and give its URL without /v1")
