"""The figures that reports give of crowds: what their clients saw, and what the tiers moved."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import xxhash

from tieredkv.bench import raw, sources
from tieredkv.bench.crowd import Answer, Outcome, Plan
from tieredkv.bench.sources import DiskShare
from tieredkv.types import KVSpec, Tier

COLUMNS: tuple[str, ...] = ("answers_per_s", "ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99")
COLUMNS += ("hit_ttft_ms.p50", "hit_ttft_ms.p90", "itl_ms.p50", "hit_rate")
COLUMNS += ("by_tier.device", "by_tier.host", "by_tier.disk", "bytes_read")
COLUMNS += ("bytes_from_disk", "page_cache", "bytes_written", "disk_useful", "overtaken", "dropped")
PLOTTED: tuple[tuple[str, ...], ...] = (
    ("answers_per_s",),
    ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99"),
    ("hit_ttft_ms.p50", "hit_ttft_ms.p90"),
    ("itl_ms.p50",),
    ("by_tier.device", "by_tier.host", "by_tier.disk"),
    ("bytes_read", "bytes_written"),
    ("disk_useful",),
)

Row = dict[str, Any]


class Timed(Protocol):
    """What `times` reads of an answer; see `Answer`."""

    @property
    def ttft_ms(self) -> float: ...

    @property
    def gaps_ms(self) -> list[float]: ...

    @property
    def is_hit(self) -> bool: ...


def raw_rate(outcomes: Iterable[Outcome]) -> float | None:
    """Return the median raw rate of the disk in some runs in GB/s; None without O_DIRECT."""
    known = [it.raw_GBps for it in outcomes if it.raw_GBps]
    return statistics.median(known) if known else None


def figures(outcomes: Sequence[Outcome], kv_spec: KVSpec, raw_GBps: float | None) -> Row:
    """Return the figures of some runs, pooled.

    Args:
        outcomes: of the runs.
        kv_spec: of the model.
        raw_GBps: the disk's rate.
    """
    block_bytes = kv_spec.block_bytes
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    reading_s = sum(outcome.reading_s for outcome in outcomes)
    num_stretches = sum(outcome.num_stretches for outcome in outcomes)
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    by_tier = {tier: sum(answer.by_tier[tier] for answer in answers) for tier in Tier}
    made = sum(len(answer.token_ids) for answer in answers)
    computed = prompt_tokens - sum(by_tier.values()) + made
    from_disk = [each for it in outcomes if (each := it.bytes_from_disk) is not None]
    num_read = counts["move_seconds.disk,host.0"]
    ahead_bytes = sum(outcome.num_ahead for outcome in outcomes) * block_bytes
    useful_bytes = counts["used_reads"] * block_bytes + ahead_bytes
    written_bytes = counts["demoted_disk_blocks"] * block_bytes
    errors = defaultdict[str | None, list[float]](list)
    for answer in answers:
        if (error := answer.prediction_error) is not None:
            errors[answer.forecast_kind].append(error)
    lost = {
        name: int(count)
        for name, count in counts.items()
        if count and name.startswith(("lost_blocks", "load_failures"))
    }
    return {
        "answers": len(answers),
        "wall_s": wall_s,
        "answers_per_s": len(answers) / wall_s,
        **times(answers),
        "prediction_error": statistics.median(chain(*errors.values())) if errors else None,
        "prediction_errors": {
            kind: {"answers": len(some), "p50": statistics.median(some)}
            for kind, some in errors.items()
        },
        "hit_rate": sum(by_tier.values()) / prompt_tokens,
        "by_tier": by_tier,
        "prompt_tokens": prompt_tokens,
        "computed_tokens": computed,
        "recomputed_tokens": sum(answer.recomputed_tokens for answer in answers),
        "bytes_read": int(num_read * block_bytes),
        "bytes_from_disk": sum(from_disk) if len(from_disk) == len(outcomes) else None,
        "page_cache": outcomes[0].page_cache,
        "bytes_useful": int(useful_bytes),
        "bytes_read_ahead": ahead_bytes,
        "bytes_written": int(written_bytes),
        "bytes_to_device": int(counts["promoted_host_blocks"] * block_bytes),
        "bytes_to_host": int(counts["demoted_host_blocks"] * block_bytes),
        "written_bytes_per_computed_token": written_bytes / computed,
        "reading_s": reading_s,
        "bytes_a_stretch": num_read * block_bytes / num_stretches if num_stretches else None,
        "raw_GBps": raw_GBps,
        "disk_busy": reading_s / wall_s,
        "disk_useful": (
            useful_bytes / reading_s / raw_GBps / 1e9 if raw_GBps and reading_s else None
        ),
        "overtaken": counts["overtaken_blocks"] / num_read if num_read else None,
        "dropped": sum(count for name, count in lost.items() if "load_failures" not in name),
        "lost_blocks": lost,
        "counters": {name: count for name, count in counts.items() if count},
    }


def bytes_problem(row: Row, plan: Plan) -> str:
    """Say if blocks that were read from disk came from memory.

    Args:
        row: of `figures`.
        plan: of the bench.
    """
    lost: dict[str, int] = row["lost_blocks"]
    num_failed = sum(count for name, count in lost.items() if name.startswith("load_failures"))
    num_bytes = max(0, row["bytes_read"] - num_failed * plan.kv_spec.block_bytes)
    ratio = sources.disk_over_loaded([row["bytes_from_disk"]], [num_bytes])
    share = DiskShare.expected(plan.settings, plan.kv_spec)
    return share.problem(row["page_cache"], ratio, may_exceed=True)


def common_answers(outcomes_by_arm: Mapping[str, Sequence[Outcome]]) -> dict[str, list[Answer]]:
    """Return each arm's answers to the requests that all arms have answered, in the same order.

    An arm that answers more requests until a run ends answers later ones too, which are longer.

    Args:
        outcomes_by_arm: of the same runs.
    """
    by_arm = {
        arm: {
            (run, answer.client, answer.turn): answer
            for run, outcome in enumerate(outcomes)
            for answer in outcome.answers
        }
        for arm, outcomes in outcomes_by_arm.items()
    }
    common = sorted(set.intersection(*map(set, by_arm.values())))
    return {arm: [known[key] for key in common] for arm, known in by_arm.items()}


def common_figures(answers: Sequence[Answer]) -> Row:
    """Return what a row says of the answers that all arms gave: their times, and their tokens."""
    tokens = json.dumps([answer.token_ids for answer in answers])
    digest = xxhash.xxh3_128_hexdigest(tokens.encode())
    return {"tokens_digest": digest, "common": {"answers": len(answers), **times(answers)}}


def times(answers: Sequence[Timed]) -> Row:
    """Return percentiles of what the clients of some answers saw."""
    gaps_ms = [gap for answer in answers for gap in answer.gaps_ms]
    hits_ms = [answer.ttft_ms for answer in answers if answer.is_hit]
    return {
        "ttft_ms": raw.percentiles([answer.ttft_ms for answer in answers], (50, 90, 99)),
        "hit_ttft_ms": raw.percentiles(hits_ms, (50, 90)),
        "num_hits": len(hits_ms),
        "itl_ms": raw.percentiles(gaps_ms, (50, 90, 99)),
    }


def equal_share(ours: Sequence[Outcome], others: Sequence[Outcome]) -> float | None:
    """Return the share of requests answered in both with the same tokens; None if there are none.

    In bfloat16, near ties part even where every key and value is right.
    """
    are_equal = []
    for our, other in zip(ours, others, strict=True):
        known = {(answer.client, answer.turn): answer.token_ids for answer in other.answers}
        for answer in our.answers:
            if (key := (answer.client, answer.turn)) in known:
                are_equal.append(answer.token_ids == known[key])
    return sum(are_equal) / len(are_equal) if are_equal else None
