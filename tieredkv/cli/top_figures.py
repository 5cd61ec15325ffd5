"""The figures of one picture of `tieredkv top`, from what a server answers at two moments.

This module knows the answers of `df` and of `/admin/history`; it does not know how they are asked
for or drawn. A server of an older version may leave out some of them.
"""

from typing import Any

import msgspec

from tieredkv.cache.counters import moved_bytes
from tieredkv.cli.versions import told
from tieredkv.server.slow_requests import SlowRequest
from tieredkv.storage.stats import Lifetimes
from tieredkv.types import Tier

MOVES = ("device,host", "host,disk", "disk,host", "host,device")
LEARNT = {
    "host,disk": "write_bytes_per_s",
    "disk,host": "read_bytes_per_s",
    "host,device": "up_bytes_per_s",
}
"""The learnt rate of each move that is planned with one."""

Json = dict[str, Any]


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds; for the disk, what its files occupy of `disk_size`."""

    blocks: int
    held_bytes: int
    size_bytes: int


class MoveRate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast bytes move from one tier to another.

    Attributes:
        learnt_bytes_per_s: what the link can do, as measured; None where nothing is planned by it.
        used_ratio: the part of it that is used; None without it.
    """

    bytes_per_s: float
    learnt_bytes_per_s: float | None
    used_ratio: float | None


class Ttft(msgspec.Struct, frozen=True, kw_only=True):
    """Times to the first token of some requests."""

    num: int
    p50_s: float
    p90_s: float


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for in the last minutes.

    Attributes:
        began_at: since when, in seconds since the epoch.
        cached_tokens: prompt tokens that were not computed, by the tier that had them.
        hit_rate: their part of all prompt tokens; None without any.
        ttft: by the slowest tier that a prefix came from, or `cold`.
    """

    began_at: float
    prompt_tokens: int
    cached_tokens: dict[str, int]
    hit_rate: float | None
    ttft: dict[str, Ttft]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a server at one moment.

    Attributes:
        source: the URL or folder that was asked.
        span_s: the time over which the moves were measured.
        model, recent, slowest: None from a folder, as only a server's URL tells them.
        lifetimes: None without a disk tier.
        untold: names of those of these fields that the server's version does not tell.
    """

    at: float
    source: str
    span_s: float
    model: str | None
    requests_running: int
    requests_waiting: int
    tiers: dict[str, TierUse]
    moves: dict[str, MoveRate]
    lifetimes: Lifetimes | None
    recent: Recent | None
    slowest: list[SlowRequest] | None
    untold: list[str] = []


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What was answered at one moment.

    Attributes:
        at: in seconds since the epoch.
        read_at: the same by `monotonic`.
        df: the answer of the verb.
        history: of the last minutes; None from a folder, empty from a server without one.
    """

    at: float
    read_at: float
    df: Json
    history: Json | None


def picture_of(source: str, before: Reading, now: Reading) -> Picture:
    """Return the figures of the later one of two readings, and what moved between them."""
    df, history, counters = now.df, now.history, now.df["counters"]
    span_s = now.read_at - before.read_at
    lifetimes = told(df["disk"], "lifetimes", Lifetimes)
    recent = _recent(history) if history else None
    slowest = told(history, "slowest", list[SlowRequest])
    parts = (
        ("lifetimes", df["disk"], lifetimes),
        ("recent", history, recent),
        ("slowest", history, slowest),
    )
    return Picture(
        at=now.at,
        source=source,
        span_s=span_s,
        model=history.get("model") if history else None,
        requests_running=counters["requests_running"],
        requests_waiting=counters["requests_waiting"],
        tiers={
            tier: TierUse(
                blocks=use["blocks"],
                held_bytes=use.get("bytes_files", use["bytes_live"]),
                size_bytes=use["bytes_budget"],
            )
            for tier in map(str, Tier)
            if (use := df[tier])
        },
        moves=_moves(before.df, df, span_s),
        lifetimes=lifetimes,
        recent=recent,
        slowest=slowest,
        untold=[name for name, answer, part in parts if answer is not None and part is None],
    )


def _moves(before: Json, now: Json, span_s: float) -> dict[str, MoveRate]:
    ended, began, rates = moved_bytes(now), moved_bytes(before), dict[str, MoveRate]()
    for between in (it for it in MOVES if it in ended):
        # A server or worker that was started again counts from zero.
        rate = max(0, ended[between] - began.get(between, 0)) / span_s
        learnt = now["learnt"].get(LEARNT.get(between))
        used = rate / learnt if learnt else None
        rates[between] = MoveRate(bytes_per_s=rate, learnt_bytes_per_s=learnt, used_ratio=used)
    return rates


def _recent(history: Json) -> Recent:
    kept = history["kept"]
    cached, total = kept["cached_tokens"], kept["prompt_tokens"]
    return Recent(
        began_at=kept["began_at"],
        prompt_tokens=total,
        cached_tokens=cached,
        hit_rate=sum(cached.values()) / total if total else None,
        ttft=msgspec.convert(history["ttft"], dict[str, Ttft]),
    )
