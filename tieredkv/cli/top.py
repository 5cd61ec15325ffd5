"""`tieredkv top`: a live picture of a running server in a terminal."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import click
import httpx
import msgspec
from rich.console import Console
from rich.live import Live

from tieredkv.cli.controls import control_of, refuse_both
from tieredkv.cli.http_answers import admin_client, reason_of, unreachable
from tieredkv.cli.output import json_option, print_json, usage_error
from tieredkv.cli.settings import settings_options
from tieredkv.cli.top_figures import Picture, Reading, picture_of
from tieredkv.cli.top_picture import draw
from tieredkv.config import LoadedSettings, Settings
from tieredkv.errors import ConfigError, ServerUnreachableError, StoreUnreachableError
from tieredkv.operate.calls import Df
from tieredkv.storage.folder.lock import has_engine
from tieredkv.units import parse_duration

DEFAULT_URL = "http://127.0.0.1:8000"
RECENT = "10m"
"""Hits and times to first token are told of this last time."""

FIRST_SPAN_S = 0.5
"""Between the two readings of the first picture."""

MIN_INTERVAL_S = 0.1
TIMEOUT_S = 30.0

Json = dict[str, Any]


class Source(Protocol):
    """A server that can be asked for its figures.

    Attributes:
        name: its URL, or the folder of its store.
    """

    name: str

    def read(self) -> Reading:
        """Return its figures as they are now.

        Raises:
            ServerUnreachableError, StoreUnreachableError: it does not answer.
            ConfigError: it refuses to.
        """


class ServerSource:
    """A server by its URL, which tells all figures."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self.name = url
        self._http = admin_client(url, admin_key, TIMEOUT_S)

    def read(self) -> Reading:
        df = self._ask("POST", "/admin/cache/df")
        if "counters" not in df:
            what = f"`{self.name}` tells nothing of its tiers"
            hint = "its engine is busy, or this is not the URL of a tieredkv server, without /v1"
            raise ServerUnreachableError(f"{what}\nhint: {hint}")
        return Reading(
            df=df,
            at=time.time(),
            read_at=time.monotonic(),
            history=self._ask("GET", f"/admin/history?last={RECENT}"),
        )

    def _ask(self, method: str, path: str) -> Json:
        """Return what the server answers; nothing if it does not know the path."""
        try:
            answer = self._http.request(method, path)
            is_busy = answer.status_code == httpx.codes.TOO_MANY_REQUESTS
            if is_busy or answer.is_server_error:
                what = f"the server at `{self.name}` cannot answer now: {reason_of(answer)}"
                raise ServerUnreachableError(what)
            if answer.status_code == httpx.codes.NOT_FOUND:
                return {}
            if not answer.is_success:
                raise ConfigError(f"`{self.name}` refuses: {reason_of(answer)}")
            told: Json = msgspec.json.decode(answer.content)
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            raise unreachable(self.name, error) from None
        return told


class FolderSource:
    """A server by the folder of its store, whose worker knows tiers, moves and lifetimes."""

    def __init__(self, settings: Settings) -> None:
        self._control = control_of(settings)
        self.name = str(Path(settings.disk_dir or ""))

    def read(self) -> Reading:
        if not self._is_used():  # else a worker would be started for a stopped store
            raise ServerUnreachableError(
                f"no server uses `{self.name}`\nhint: `tieredkv df` shows a stopped store"
            )
        df = self._control.answer(Df())
        if "counters" not in df:  # vLLM, or an engine that is busy
            what = f"what uses `{self.name}` tells nothing of its tiers"
            raise ServerUnreachableError(f"{what}\nhint: `tieredkv df` shows what is on disk")
        return Reading(df=df, at=time.time(), read_at=time.monotonic(), history=None)

    def _is_used(self) -> bool:
        try:
            folder_fd = os.open(self.name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # it was removed meanwhile
            return False
        try:
            return has_engine(folder_fd)
        finally:
            os.close(folder_fd)


@click.command()
@settings_options("disk_dir", "admin_key")
@click.option(
    "--url",
    help=f"URL of the server, without /v1. Without --url and --disk-dir it is {DEFAULT_URL}.",
)
@click.option("--interval", default="2s", help="Time between two pictures, such as 500ms.")
@click.option(
    "--once",
    is_flag=True,
    help="Print one picture and end. So does --json, and output that is no terminal.",
)
@json_option
def top(loaded: LoadedSettings, url: str | None, interval: str, once: bool, as_json: bool) -> int:
    """Show a running server live: tiers, moves, hit rate, time to first token, slow requests.

    With --url the server is asked, which needs its admin key if it has one; better set
    TIEREDKV_ADMIN_KEY than --admin-key, which others can read. With --disk-dir instead its store is
    asked, which needs no key, but knows neither hits, nor times, nor requests.

    Moves are measured between two pictures. "of the link" is the part that they use of the rate
    that the link was measured to have. Hit rate and times to first token are those of the last ten
    to twelve minutes, and the slowest requests those of the last nine to ten. For each of these
    the table tells how many tokens of its prompt each tier had (on a narrow terminal, all tiers
    together), whose it was, the slowest tier among them, and why not more was found. Tenants are
    told where there are several, but not on a terminal of 60 columns. `expected` is the age at
    which blocks will leave the disk on average, and 1 % of the evicted ones were not older than
    `p1 age`.

    Ctrl-C or q ends it. The exit code is 3 if no server answers.

    \b
    Examples:
      tieredkv top
      tieredkv top --url http://gpu1:8000 --interval 5s
      tieredkv top --disk-dir ./kv --once --json
    """
    interval_s = parse_duration(interval)
    if interval_s < MIN_INTERVAL_S:
        raise usage_error(f"`{interval}` is too short for --interval; it is at least 100ms.")
    refuse_both(loaded, url)
    settings = loaded.settings
    source: Source
    if url is None and settings.disk_dir is not None:
        source = FolderSource(settings)
    else:
        source = ServerSource(url or DEFAULT_URL, settings.admin_key)
    if as_json or once or not sys.stdout.isatty():
        _show_once(source, as_json)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _show_live(source, interval_s)
    return 0


def _show_once(source: Source, as_json: bool) -> None:
    before = source.read()
    time.sleep(FIRST_SPAN_S)
    picture = picture_of(source.name, before, source.read())
    if as_json:
        print_json(msgspec.to_builtins(picture))
    else:
        console = Console()
        console.print(draw(picture, console))


def _show_live(source: Source, interval_s: float) -> None:
    """Draw pictures until the user ends it.

    A server that stops answering leaves its last picture, with a note, until it answers again.
    """
    console = Console()
    before, span_s = source.read(), FIRST_SPAN_S
    picture: Picture | None = None
    with _keys() as is_q_pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while not is_q_pressed(span_s):
            note = ""
            try:
                now = source.read()
                picture, before = picture_of(source.name, before, now), now
            except (ServerUnreachableError, StoreUnreachableError) as error:
                if picture is None:
                    raise
                note = str(error).splitlines()[0]
            drawn = draw(picture, console, note=note, height=console.height)
            live.update(drawn, refresh=True)
            span_s = interval_s


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys from the terminal, without showing them, while the context lasts.

    Yields:
        A function that waits so many seconds, and returns whether q was pressed meanwhile.
    """
    if not sys.stdin.isatty():

        def sleep(timeout_s: float) -> bool:
            time.sleep(timeout_s)
            return False

        yield sleep
        return
    fd = sys.stdin.fileno()
    settings = termios.tcgetattr(fd)

    def is_q_pressed(timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            if os.read(fd, 1) in (b"q", b"Q", b""):  # the last if the terminal is gone
                return True
        return False

    try:
        tty.setcbreak(fd)
        yield is_q_pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)
