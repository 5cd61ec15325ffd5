"""The pictures of `tieredkv top`: their figures, and how they are drawn."""

import contextlib
import copy
import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
import pytest
from rich.console import Console

from tests.golden import refused, told
from tieredkv.cli import top
from tieredkv.cli.top_figures import MoveRate, Picture, Reading, Recent, TierUse, Ttft, picture_of
from tieredkv.cli.top_picture import draw
from tieredkv.config import Settings
from tieredkv.errors import ServerUnreachableError
from tieredkv.operate.ask import StoreControl
from tieredkv.server.slow_requests import SlowRequest
from tieredkv.storage.folder.lock import hold_for_engine
from tieredkv.storage.stats import Lifetimes

NOW = 1_800_000_000.0
GIB = 1 << 30

SLOW = SlowRequest(
    at=NOW - 75,
    tenant="a",
    ttft_s=12.5,
    queue_s=1.25,
    prefill_s=11.0,
    source="disk",
    prompt_tokens=131_072,
    cached_tokens={"device": 64, "disk": 120_000},
    recomputed_tokens=16,
    miss_reason="evicted_device",
)
PICTURE = Picture(
    at=NOW,
    source="http://127.0.0.1:8000",
    span_s=2.0,
    model="[red]llama-3.1-8b",
    requests_running=3,
    requests_waiting=1,
    tiers={
        "device": TierUse(blocks=10, held_bytes=1 * GIB, size_bytes=4 * GIB),
        "host": TierUse(blocks=0, held_bytes=0, size_bytes=64 * GIB),
        "disk": TierUse(blocks=99, held_bytes=2 * GIB, size_bytes=1 * GIB),
    },
    moves={
        "device,host": MoveRate(bytes_per_s=GIB / 2, learnt_bytes_per_s=None, used_ratio=None),
        "disk,host": MoveRate(bytes_per_s=GIB, learnt_bytes_per_s=2.0 * GIB, used_ratio=0.5),
    },
    lifetimes=Lifetimes(
        write_bytes_per_s={"24h": 1e6},
        promised_s={"24h": 86_400.0},
        expected_s={"24h": 7200.0},
        num_evicted={"24h": 17},
        evicted_age_p1_s={"24h": 3700.0},
        shortfall="`24h` promises 1d, but `disk_size` = `4 GiB` would do",
    ),
    recent=Recent(
        began_at=NOW - 660,
        prompt_tokens=200_000,
        cached_tokens={"device": 30_000, "disk": 120_000},
        hit_rate=0.75,
        ttft={
            "cold": Ttft(num=5, p50_s=0.25, p90_s=1.5),
            "disk": Ttft(num=1, p50_s=12.5, p90_s=12.5),
        },
    ),
    slowest=[SLOW, *[msgspec.structs.replace(SLOW, ttft_s=0.0123, miss_reason=None)] * 19],
)


def drawn(picture: Picture, columns: int, *, encoding: str = "utf-8", **options: Any) -> list[str]:
    """Return the lines of a picture without the spaces at their ends."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=columns, height=100, force_terminal=False)
    console.print(draw(picture, console, **options))
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


def test_a_wide_terminal_shows_all_figures() -> None:
    lines = drawn(PICTURE, 120)
    assert "[red]llama-3.1-8b  http://127.0.0.1:8000" in lines[0], "a name is no markup"
    assert lines[1:23] == [
        "requests: 3 running, 1 waiting",
        "",
        "tier    used                          held    size",
        "device  █████░░░░░░░░░░░░░░░   25 %  1 GiB   4 GiB",
        "host    ░░░░░░░░░░░░░░░░░░░░    0 %    0 B  64 GiB",
        "disk    ████████████████████  200 %  2 GiB   1 GiB",
        "",
        "move            of the link                 per second",
        "device to host                           -     512 MiB",
        "disk to host    ██████████░░░░░░░░░░  50 %       1 GiB",
        "",
        "on disk  promised  expected  evicted  p1 age",
        "24h            1d        2h       17   1h 1m",
        "warning: `24h` promises 1d, but `disk_size` = `4 GiB` would do",
        "",
        "last 11m: 200000 prompt tokens, hit rate 75 %",
        "first token from  requests     p50    p90  cached tokens",
        "cold                     5  250 ms   1.5s              -",
        "disk                     1   12.5s  12.5s         120000",
        "",
        "slowest requests of the last ten minutes",
        " ttft  queue  prompt  device  host    disk     ago  from  miss",
    ]
    assert lines[23:25] == [
        "12.5s  1.25s  131072      64     0  120000  1m 15s  disk  evicted_device",
        "12 ms  1.25s  131072      64     0  120000  1m 15s  disk  -",
    ]
    assert len(lines) == 22 + 1 + 20


def test_a_terminal_of_60_columns_cuts_nothing_and_adds_the_tiers_up() -> None:
    slowest = msgspec.structs.replace(SLOW, ttft_s=0.999, miss_reason="behind_lookback")
    lines = drawn(msgspec.structs.replace(PICTURE, slowest=[slowest]), 60)
    assert max(map(len, lines)) <= 60 and "…" not in "".join(lines[1:])
    assert lines[-2:] == [
        "  ttft  queue  prompt  cached  from  miss",
        "999 ms  1.25s  131072  120064  disk  behind_lookback",
    ]


@pytest.mark.parametrize(
    ("columns", "titles", "row"),
    [
        (
            120,
            " ttft  queue  prompt  device  host    disk     ago  tenant                from  miss",
            "12.5s  1.25s  131072      64     0  120000  1m 15s  [b]                   disk"
            "  evicted_device",
        ),
        (
            80,
            " ttft  queue  prompt  cached  tenant                from  miss",
            "12.5s  1.25s  131072  120064  [b]                   disk  evicted_device",
        ),
        (
            60,
            " ttft  queue  prompt  cached  from  miss",
            "12.5s  1.25s  131072  120064  disk  evicted_device",
        ),
    ],
)
def test_several_tenants_are_named_where_there_is_room(columns: int, titles: str, row: str) -> None:
    slowest = [msgspec.structs.replace(SLOW, tenant=name) for name in ("[b]", "a long name " * 9)]
    lines = drawn(msgspec.structs.replace(PICTURE, slowest=slowest), columns)
    assert lines[-3:-1] == [titles, row]


def test_a_terminal_without_unicode_has_bars_too() -> None:
    lines = drawn(PICTURE, 60, encoding="ascii")
    assert lines[4].startswith("device  #####...............   25 %")


def test_the_slowest_requests_are_those_that_fit_the_height() -> None:
    note = "the server does not answer"
    lines = drawn(PICTURE, 120, note=note, height=30)
    assert len(lines) == 30 and lines[1] == note
    assert len(drawn(PICTURE, 120, height=5)) == 22 + 2, "one is always told"


def test_a_folder_tells_what_needs_a_url() -> None:
    from_folder = msgspec.structs.replace(
        PICTURE, model=None, recent=None, slowest=None, lifetimes=Lifetimes()
    )
    lines = drawn(from_folder, 120)
    told("\n".join(lines[-3:]))


def test_a_server_that_was_asked_for_nothing_has_a_picture() -> None:
    idle = Recent(began_at=NOW, prompt_tokens=0, cached_tokens={}, hit_rate=None, ttft={})
    lines = drawn(msgspec.structs.replace(PICTURE, recent=idle, slowest=[]), 60)
    told("\n".join(lines[-3:]))


def reading(at: float, *, promoted: int, read: int | None) -> Reading:
    tier = {"blocks": 3, "bytes_live": 300, "bytes_budget": 1000}
    lifetimes = msgspec.to_builtins(Lifetimes())
    disk = {**tier, "bytes_files": 500, "bytes_written": 0, "bytes_read": read}
    counters = {"promoted_host_blocks": promoted, "demoted_host_blocks": 0}
    df = {
        "device": tier,
        "host": tier,
        "disk": None if read is None else {**disk, "lifetimes": lifetimes},
        "block_bytes": 100,
        "counters": {**counters, "requests_running": 1, "requests_waiting": 2},
        "learnt": {
            "up_bytes_per_s": 1000.0,
            "read_bytes_per_s": None if read is None else 400.0,
            "write_bytes_per_s": None if read is None else 400.0,
        },
    }
    return Reading(at=NOW + at, read_at=at, df=df, history=None)


def test_moves_are_measured_between_two_readings() -> None:
    picture = picture_of(
        "./kv", reading(10, promoted=5, read=100), reading(12, promoted=9, read=300)
    )
    up = MoveRate(bytes_per_s=200.0, learnt_bytes_per_s=1000.0, used_ratio=0.2)
    assert picture.moves["host,device"] == up
    assert picture.moves["disk,host"].bytes_per_s == 100.0
    assert picture.moves["disk,host"].used_ratio == pytest.approx(0.25)
    assert picture.moves["device,host"].used_ratio is None
    assert (picture.at, picture.span_s) == (NOW + 12, 2)
    assert (picture.requests_running, picture.requests_waiting) == (1, 2)
    assert picture.tiers["device"].held_bytes == 300
    assert picture.tiers["disk"].held_bytes == 500, "files count, as `disk_size` bounds them"


def test_a_server_that_was_started_again_moved_nothing() -> None:
    picture = picture_of("./kv", reading(10, promoted=5, read=100), reading(12, promoted=0, read=0))
    assert {move.bytes_per_s for move in picture.moves.values()} == {0.0}


def test_without_a_disk_there_is_none_in_the_picture() -> None:
    picture = picture_of(
        "http://x", reading(0, promoted=0, read=None), reading(1, promoted=0, read=None)
    )
    assert picture.tiers.keys() == {"device", "host"}
    assert picture.moves.keys() == {"device,host", "host,device"}
    assert picture.lifetimes is None


HISTORY = {
    "model": "m",
    "kept": {"began_at": NOW, "prompt_tokens": 0, "cached_tokens": {}},
    "ttft": {},
    "slowest": [],
}
URL_READING = msgspec.structs.replace(reading(1, promoted=0, read=0), history=HISTORY)


def without(*names: str) -> dict[str, Any]:
    return {name: part for name, part in HISTORY.items() if name not in names}


@pytest.mark.parametrize(
    ("history", "untold"),
    [
        (HISTORY, []),
        (without("slowest"), ["slowest"]),
        ({**HISTORY, "slowest": [{"at": 1.0}]}, ["slowest"]),
        ({}, ["recent", "slowest"]),
        (None, []),
    ],
)
def test_what_an_older_server_does_not_tell_is_named(
    history: dict[str, Any] | None, untold: list[str]
) -> None:
    now = msgspec.structs.replace(URL_READING, history=history)
    picture = picture_of("http://x", reading(0, promoted=0, read=0), now)
    assert picture.untold == untold
    told(drawn(picture, 120)[-1])
    assert any("hit rate -" in line for line in drawn(picture, 60)) == (picture.recent is not None)


def test_a_server_that_does_not_know_lifetimes_has_a_picture() -> None:
    del (df := copy.deepcopy(URL_READING.df))["disk"]["lifetimes"]
    now = msgspec.structs.replace(URL_READING, df=df)
    picture = picture_of("http://x", reading(0, promoted=0, read=0), now)
    assert (picture.lifetimes, picture.untold) == (None, ["lifetimes"])
    told(drawn(picture, 120)[-3])


@contextlib.contextmanager
def source_of(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[top.ServerSource]:
    """Yield a source by a URL that has these answers only."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path.rpartition("/")[2])
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    with click.Context(top.top):
        yield top.ServerSource("http://x", None)


@pytest.mark.parametrize(
    ("answers", "history"),
    [({"df": URL_READING.df}, {}), ({"df": URL_READING.df, "history": HISTORY}, HISTORY)],
)
def test_a_url_may_know_less(
    answers: dict[str, Any], history: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with source_of(answers, monkeypatch) as source:
        assert source.read().history == history


@pytest.mark.parametrize("answers", [{}, {"df": {"device": None, "engine": "no answer"}}])
def test_a_url_that_tells_nothing_of_its_tiers_is_named(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with source_of(answers, monkeypatch) as source, refused(ServerUnreachableError):
        source.read()


def test_an_engine_that_tells_nothing_of_its_tiers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreControl, "answer", lambda *_: {"disk": {}})
    source = top.FolderSource(Settings(disk_dir=str(tmp_path)))
    with refused(ServerUnreachableError):
        source.read()
    folder_fd = hold_for_engine(str(tmp_path))
    with refused(ServerUnreachableError):
        source.read()
    os.close(folder_fd)
