"""The verbs of a running server by its URL, as `operate.ask` has those of a store."""

import contextlib
import json
import re
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec

from tieredkv.cli.http_answers import admin_client, code_of, reason_of, unreachable
from tieredkv.errors import (
    ConfigError,
    ServerUnreachableError,
    StorageError,
    StoreUnreachableError,
    TieredKVError,
    UnknownIdError,
)
from tieredkv.operate.calls import Call, EvictFilter
from tieredkv.operate.infos import BlockInfo, ChainInfo
from tieredkv.operate.verb import Asking, Page

TIMEOUTS = httpx.Timeout(600.0, connect=30.0)
"""A server says nothing while it looks through a large store."""

_PAGES: dict[str, Any] = {"chains": list[ChainInfo], "chain": list[BlockInfo]}
"""What the items of a verb's list are, by its name."""

PAGE_ITEMS = 256
"""As many as in a page of a store's worker, so that tables are alike."""

_GAP = re.compile(r"[\s,]*")
_SERVERS_OWN = ("evicted_responses", "evicted_answers")
"""What only a server's answer to an eviction has."""


class ServerControl:
    """The verbs of one server; used by one thread while the command runs.

    Args:
        url: of the server, without the path of an API.
        admin_key: of the server; None if it has none.
    """

    def __init__(self, url: str, admin_key: str | None) -> None:
        self._url = url
        self._http = admin_client(url, admin_key, TIMEOUTS)

    def answer(self, call: Call) -> dict[str, Any]:
        """Return the answer of a verb without its list, if it has one.

        Raises:
            TieredKVError: of the kind that the store's worker would tell of.
            ServerUnreachableError: the server does not answer.
        """
        with self._asked(call) as answer:
            told: dict[str, Any] = msgspec.json.decode(answer.read())
        if isinstance(call, EvictFilter):
            return {name: told[name] for name in told if name not in _SERVERS_OWN}
        return told

    def pages(self, call: Call) -> Asking:
        """Yield the list that a verb answers with, some items at a time; return the rest of it.

        Raises:
            TieredKVError, ServerUnreachableError: as for `answer`.
            StoreUnreachableError: the answer is cut short.
        """
        kind, has_page, page = _PAGES[call.listed_as], False, Page()
        try:
            with self._asked(call) as answer:
                items = read_list(answer.iter_text(), call.listed_as)
                while True:
                    try:
                        page.append(next(items))
                    except StopIteration as ending:
                        rest: dict[str, Any] = ending.value
                        break
                    if len(page) == PAGE_ITEMS:
                        yield msgspec.convert(page, kind)
                        has_page, page = True, Page()
                if page:
                    yield msgspec.convert(page, kind)
                return rest
        except ServerUnreachableError:
            if not (has_page or page):
                raise
            what = "ended in the middle of its answer, so the answer is incomplete"
            raise StoreUnreachableError(f"the server at `{self._url}` {what}") from None

    @contextlib.contextmanager
    def _asked(self, call: Call) -> Iterator[httpx.Response]:
        """Ask the server; yield its answer, whose content is still to be read."""
        fields = msgspec.to_builtins(call)
        fields.pop("type", None)
        try:
            path = f"/admin/cache/{call.verb}"
            with self._http.stream("POST", path, json=fields) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self._refusal(answer)
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            if isinstance(error, TieredKVError):
                raise
            raise unreachable(self._url, error) from None

    def _refusal(self, answer: httpx.Response) -> TieredKVError:
        """Return the error that an answer is."""
        code, reason = code_of(answer), reason_of(answer)
        if code == "unknown_id":
            return UnknownIdError(reason)
        if code == "store_unreachable":
            return StoreUnreachableError(reason)
        if code == "store":  # what the command line is told, without the server's own words
            return StorageError(reason) if answer.is_server_error else ConfigError(reason)
        if answer.is_server_error or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            what = f"the server at `{self._url}` cannot answer now: {reason}"
            return ServerUnreachableError(what)
        if answer.status_code == httpx.codes.NOT_FOUND:
            hint = "hint: give the URL of a tieredkv server, without /v1"
            return ConfigError(f"`{self._url}` has no admin API: {reason}\n{hint}")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            hint = "hint: give the server's admin key by TIEREDKV_ADMIN_KEY or --admin-key"
            return ConfigError(f"`{self._url}` refuses: {reason}\n{hint}")
        return ConfigError(f"`{self._url}` refuses: {reason}")


def read_list(texts: Iterator[str], name: str) -> Generator[Any, None, dict[str, Any]]:
    """Yield the items of a document `{name: [...], ...}` as they arrive; return its other fields.

    Raises:
        ValueError: the document has another form, or is cut short.
    """
    decode, head = json.JSONDecoder().raw_decode, re.compile(rf'\s*{{\s*"{name}"\s*:\s*\[')
    text, is_begun, is_read = "", False, False
    for more in texts:
        text += more
        if not is_begun and (begun := head.match(text)):
            text, is_begun = text[begun.end() :], True
        if not is_begun or is_read:
            continue
        place = 0
        while (gap := _GAP.match(text, place)) and (place := gap.end()) < len(text):
            if is_read := text[place] == "]":
                break
            try:
                item, place = decode(text, place)
            except ValueError:  # the rest of the item has yet to arrive
                break
            yield item
        text = text[place:]
    if not is_read:
        raise ValueError("the answer is no list, or is cut short")
    others: dict[str, Any] = json.loads("{" + text[1:].lstrip().removeprefix(","))
    return others
