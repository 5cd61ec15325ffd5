"""Replays sessions of a coding assistant through the pools, and compares the hit rate with ideals.

    python -m tests.stress.pool_replay --sessions 8 --turns 15
    python -m tests.stress.pool_replay --trace requests.jsonl

The scheduler and the tiered cache are the real ones. Blocks have only a few bytes, copies end at
once, and time is computed: a step lasts as long as its tokens take on the modelled device. The same
requests, in the order in which they were first admitted, are then given to ideal pools, which hold
nothing back for running requests or for copies:

    inclusive   VRAM and host memory are two LRU pools, and a block that returns to VRAM stays below
    one_pool    one LRU pool as large as both
    unbounded   nothing is ever evicted

Sessions follow a script made from a seed: the first prompt is log-normal, each turn adds to it, and
one turn in eight replaces its last third. A trace has one JSON object a line, as the Mooncake
traces do: `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one id per block of
`--trace-block` tokens. With a `session`, a request is sent only after the session's last answer.
"""

import heapq
import itertools
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from tests.fake_store import kept_by
from tests.fakes import START, FakeClock
from tests.stress.engine_thread import NoCopies
from tieredkv.bench import raw
from tieredkv.cache.catalog import Catalog
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.prefix import Prefix
from tieredkv.cache.tiered import TieredCache
from tieredkv.cache.tiers import Tiers
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.scheduler import ScheduledRow, Scheduler
from tieredkv.hashing import chain_hashes
from tieredkv.retention import RetentionPolicies
from tieredkv.types import BlockHash

BLOCK_BYTES = 8
ROOT = BlockHash(b"pool replay".ljust(32, b"\0"))
VOCAB_SIZE = 128_256
FIRST_TOKENS = (18_000, 0.6, 8_000, 60_000)  # median, sigma, least, most
MEDIAN_ADDED, P90_ADDED = 600, 6_000
MOST_TOKENS = 72_000
MEAN_THINK_S, MOST_THINK_S = 1.0, 6.0

TOKEN_S, PAIR_S, DECODE_S = 2.4e-5, 7.3e-10, 0.01
"""A prompt's token, a pair of tokens that attend, and a step of an 8B model on one H200."""

Row = dict[str, Any]


class Turn(NamedTuple):
    """One request of a session, sent `think_s` after the last answer and not before `due`."""

    token_ids: list[int]
    num_output_tokens: int
    think_s: float = 0.0
    due: float = 0.0


def scripted(
    num_sessions: int, num_turns: int, num_output_tokens: int, seed: int
) -> list[list[Turn]]:
    """Return the turns of each session; equal for equal arguments."""
    return [
        list(_turns(random.Random(f"{seed} {number}"), num_turns, num_output_tokens))
        for number in range(num_sessions)
    ]


def _turns(rng: random.Random, num_turns: int, num_output_tokens: int) -> Iterator[Turn]:
    median, sigma, least, most = FIRST_TOKENS
    spread = math.log(P90_ADDED / MEDIAN_ADDED) / 1.2816
    num_tokens = int(min(most, max(least, median * math.exp(rng.gauss(0, sigma)))))
    token_ids = rng.choices(range(VOCAB_SIZE), k=num_tokens)
    for _ in range(num_turns):
        think_s = min(MOST_THINK_S, rng.expovariate(1 / MEAN_THINK_S))
        yield Turn(token_ids, num_output_tokens, think_s)
        kept = len(token_ids) * 2 // 3 if rng.random() < 1 / 8 else len(token_ids)
        num_added = len(token_ids) - kept + int(MEDIAN_ADDED * math.exp(rng.gauss(0, spread)))
        num_added = max(1, min(num_added, MOST_TOKENS - kept))
        token_ids = token_ids[:kept] + rng.choices(range(VOCAB_SIZE), k=num_added)


def traced(path: Path, trace_block: int, most_requests: int) -> list[list[Turn]]:
    """Return the turns of each session of a trace; a request without a session is its own."""
    sessions: defaultdict[object, list[Turn]] = defaultdict(list)
    with path.open() as lines:
        for number, line in enumerate(itertools.islice(lines, most_requests)):
            row = json.loads(line)
            token_ids = [each for each in row["hash_ids"] for _ in range(trace_block)]
            turn = Turn(
                token_ids[: row["input_length"]],
                row["output_length"],
                due=row.get("timestamp", 0) / 1e3,
            )
            sessions[row.get("session", (number,))].append(turn)
    return list(sessions.values())


class Replay:
    """A scheduler and a tiered cache that serve the sessions on a modelled device.

    Attributes:
        order: hashes of each request's prompt and answer, in the order of first admission.
        by_tier: tokens of prompts by the tier that they were found in.
    """

    def __init__(
        self,
        *,
        device_blocks: int,
        host_blocks: int,
        block_size: int = 16,
        at_once: int = 256,
        batched_tokens: int = 8192,
    ) -> None:
        self.clock, self.block_size = FakeClock(), block_size
        device = torch.zeros(device_blocks, BLOCK_BYTES, dtype=torch.uint8)
        host = torch.zeros(host_blocks, BLOCK_BYTES, dtype=torch.uint8)
        self.tiers = Tiers(
            device=BlockPool(device_blocks),
            host=BlockPool(host_blocks),
            catalog=Catalog(RetentionPolicies()),
            transfer=DeviceLink[Any](NoCopies(device, host)),
            store=None,
            clock=self.clock,
            block_bytes=BLOCK_BYTES,
            block_size=block_size,
            restore="load",
            device_reserve_blocks=2 * batched_tokens // block_size,  # as the engine does
        )
        self.cache = TieredCache(self.tiers)
        self.scheduler = Scheduler(
            cache=self.cache,
            block_size=block_size,
            max_num_seqs=at_once,
            max_num_batched_tokens=batched_tokens,
            max_num_alone_tokens=batched_tokens,
            hash_algo="sha256",
        )
        self.order: list[Request] = []
        self.by_tier: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_steps = 0
        self._answers = itertools.count(VOCAB_SIZE)

    def run(self, sessions: Iterable[Sequence[Turn]]) -> None:
        """Serve all turns; each session sends its next one after the answer."""
        start, ties = self.clock.moment, itertools.count()
        rest: dict[int, Iterator[Turn]] = {}
        arrivals: list[tuple[float, int, int, Turn]] = []

        def send_next(session: int) -> None:
            turn = next(rest[session], None)
            if turn is not None:
                at = max(self.clock.moment + turn.think_s, start + turn.due)
                heapq.heappush(arrivals, (at, next(ties), session, turn))

        for session, turns in enumerate(sessions):
            rest[session] = iter(turns)
            send_next(session)
        session_of: dict[Request, int] = {}
        while arrivals or session_of:
            while arrivals and (arrivals[0][0] <= self.clock.moment or not session_of):
                at, _, session, turn = heapq.heappop(arrivals)
                self.clock.moment = max(self.clock.moment, at)
                session_of[self._add(turn)] = session
            for request in self._step():
                send_next(session_of.pop(request))

    def _add(self, turn: Turn) -> Request:
        params = SamplingParams(max_tokens=turn.num_output_tokens, temperature=0.0)
        hashes = chain_hashes(ROOT, turn.token_ids, self.block_size)
        request = Request(
            EngineRequest(request_id="r", prompt_token_ids=turn.token_ids, params=params),
            prefix=Prefix(ROOT, b"", hashes, claims=kept_by("in_memory")),
            sampler=SamplerState(params, 0),
            max_output_tokens=turn.num_output_tokens,
        )
        self.scheduler.add(request)
        return request

    def _step(self) -> list[Request]:
        """Compute one step; return the requests that it ended."""
        rows = self.scheduler.schedule()
        self.cache.pump()
        self.num_steps += 1
        self.clock.moment += DECODE_S + sum(map(_seconds, rows))
        ended = [row.request for row in rows if self._complete(row)]
        self.cache.poll()
        return ended

    def _complete(self, row: ScheduledRow) -> bool:
        """Publish what a row has computed; return whether its request has ended."""
        request = row.request
        self.scheduler.complete(row)
        if not row.row.needs_logits:
            return False
        request.append(next(self._answers))
        if not request.touched_at:
            request.touched_at = 1.0
            self.cache.touch(request.prefix)
        if request.usage is None:
            usage = request.usage = request.measure_usage(self.block_size, 0, self.cache.why_missed)
            self.order.append(request)
            self.by_tier.update({str(k): n for k, n in usage.cached_tokens_by_tier.items()})
            self.num_prompt_tokens += request.num_prompt_tokens
        self.scheduler.seal_full_blocks(request)
        if not request.is_long_enough:
            return False
        self.scheduler.remove(request)
        return True

    def report(self) -> Row:
        """Return the hit rates of the pools and of the ideals, and what the pools did."""
        counters, total = self.tiers.counters, self.num_prompt_tokens
        chains = [(each.prefix.hashes, each.num_prompt_tokens) for each in self.order]
        size = self.block_size
        blocks = self.tiers.device.num_blocks, self.tiers.host.num_blocks
        rates = {
            "measured": sum(self.by_tier.values()) / total,
            "inclusive": inclusive(chains, *blocks, size),
            "one_pool": one_pool(chains, sum(blocks), size),
            "unbounded": one_pool(chains, sum(len(hashes) for hashes, _ in chains), size),
        }
        return {
            "requests": len(chains),
            "prompt_tokens": total,
            "seconds": self.clock.moment - START,
            "hit_rate": {name: round(rate, 4) for name, rate in rates.items()},
            "hit_rate_by_tier": {k: round(n / total, 4) for k, n in self.by_tier.items() if n},
            "preemptions": self.scheduler.num_preemptions,
            "allocation_waits": counters.allocation_waits,
            "demotions_dropped": counters.demotions_dropped,
            "copied_up": counters.promoted_host_blocks,
            "copied_down": counters.demoted_host_blocks,
            "evictions": dict(counters.evictions),
        }


def _seconds(row: ScheduledRow) -> float:
    count = row.end - row.start
    if count == 1:
        return 0.0
    return count * (TOKEN_S + PAIR_S * (row.start + row.end) / 2)


Chains = Iterable[tuple[Sequence[BlockHash], int]]
"""The hashes of each request's prompt and answer, and the number of tokens of the prompt."""


def one_pool(chains: Chains, num_blocks: int, block_size: int) -> float:
    """Return the token hit rate of one LRU pool."""
    return inclusive(chains, num_blocks, 0, block_size)


def inclusive(chains: Chains, device_blocks: int, host_blocks: int, block_size: int) -> float:
    """Return the token hit rate of two LRU pools; the second one keeps what the first one reads."""
    device: OrderedDict[BlockHash, None] = OrderedDict()
    host: OrderedDict[BlockHash, None] = OrderedDict()
    num_found = num_tokens = 0
    for hashes, num_prompt_tokens in chains:
        prompt = hashes[: (num_prompt_tokens - 1) // block_size]
        found = itertools.takewhile(lambda each: each in device or each in host, prompt)
        num_found += block_size * sum(1 for _ in found)
        num_tokens += num_prompt_tokens
        for block_hash in reversed(hashes):  # the head is evicted last
            if block_hash in host:
                host.move_to_end(block_hash)
            device[block_hash] = None
            device.move_to_end(block_hash)
        while len(device) > device_blocks:
            block_hash, _ = device.popitem(last=False)
            host[block_hash] = None
            host.move_to_end(block_hash)
        while len(host) > host_blocks:
            host.popitem(last=False)
    return num_found / num_tokens


@click.command()
@click.option("--sessions", default=8, show_default=True, help="How many run at the same time.")
@click.option("--turns", default=15, show_default=True, help="Of each session.")
@click.option("--output-tokens", default=120, show_default=True, help="Of each answer.")
@click.option("--seed", default=0, show_default=True, help="Of the sessions' scripts.")
@click.option("--trace", type=click.Path(path_type=Path), help="Requests to replay instead.")
@click.option("--trace-block", default=512, show_default=True, help="Tokens per id of a trace.")
@click.option("--most-requests", default=1000, show_default=True, help="Of a trace.")
@click.option("--at-once", default=256, show_default=True, help="The most running requests.")
@click.option("--device-blocks", default=12_288, show_default=True, help="Blocks of VRAM.")
@click.option("--host-blocks", default=8_192, show_default=True, help="Pages of host memory.")
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(
    *,
    sessions: int,
    turns: int,
    output_tokens: int,
    seed: int,
    trace: Path | None,
    trace_block: int,
    most_requests: int,
    commit: str | None,
    **options: int,
) -> None:
    """Replay sessions through the pools; print their hit rate and that of ideal pools as JSON."""
    if trace is not None:
        script = traced(trace, trace_block, most_requests)
    else:
        script = scripted(sessions, turns, output_tokens, seed)
    replay = Replay(**options)
    replay.run(script)
    head = raw.head(commit, "python -m tests.stress.pool_replay")
    click.echo(json.dumps(head | replay.report()))


if __name__ == "__main__":
    main()
