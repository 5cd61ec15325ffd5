"""The engine on a modelled machine (`tests.modelled`): its times are computed, and so exact."""

import contextlib
import itertools
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Literal, NamedTuple, cast
from unittest import mock

import pytest

from tests.levels import few
from tests.modelled import H200_8B, TWO_CORES, Machine, ModelledCore, VirtualTime
from tieredkv.bench import crowd, sessions
from tieredkv.cache.plan_log import replay
from tieredkv.cache.room import PATIENCE_S
from tieredkv.config import load_settings
from tieredkv.engine.engine_messages import EngineRequest, RequestUsage, TokenOutput
from tieredkv.engine.engine_process import IDLE_WAIT_S
from tieredkv.engine.llm import LLM
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.scheduler import BESIDE_BRIEF
from tieredkv.steps import pairs
from tieredkv.types import Tier, ignore_progress

Restore = Literal["auto", "load", "compute"]
RESTORES: tuple[Restore, ...] = ("load", "compute", "auto", "compute", "auto")
LENGTHS = (2_048, 8_192, 32_768)
EACH_LENGTH = pytest.mark.parametrize(
    "length", [LENGTHS[0], pytest.param(LENGTHS[1], marks=pytest.mark.slow), LENGTHS[2]]
)


def with_lengths(name: str, values: Sequence[float]) -> pytest.MarkDecorator:
    """Parametrise by values, of which the first two meet one length each in every run."""
    first = [(values[0], LENGTHS[2]), (values[1], LENGTHS[0])]
    rest = [it for it in itertools.product(values, LENGTHS) if it not in first]
    return pytest.mark.parametrize((name, "length"), few([*first, *rest], len(first)))


BLOCK_SIZE = 64
NUM_NEW = 16
"""Tokens of a prompt behind those that the disk has."""

RAM_ONLY: dict[str, object] = {"disk_dir": None, "default_retention": "in_memory"}

MOST_BAD = 4
"""Requests that a rate that is wrong may delay."""


class Served(NamedTuple):
    """The time to a request's first token in seconds, and where its prompt came from."""

    ttft_s: float
    usage: RequestUsage


class Rig:
    """An engine with a disk tier on a modelled machine; its requests come one after another."""

    def __init__(self, machine: Machine, time: VirtualTime, **settings: object) -> None:
        self.time, self.numbers = time, itertools.count()
        known: dict[str, object] = {
            "model": "random:llama-3.1-8b",
            "block_size": BLOCK_SIZE,
            "device_size": "10GiB",
            "host_size": "10GiB",
            "disk_dir": "/nowhere",
            "disk_size": "40GiB",
            "default_retention": "24h",
        }
        self.core = ModelledCore(
            load_settings(arguments={**known, **settings}).settings, machine, self.time
        )
        self.tiers, self.tokens = (
            self.core.parts.tiers,
            range(min(128_000, self.core.info.vocab_size)),
        )
        self.random, self.in_vram_s = random.Random(0), 0.0

    @property
    def GBps(self) -> float:
        """What the disk gives, within the operator's limit."""
        assert self.core.disk is not None
        return min(self.core.disk.GBps, self.tiers.disk_link.read_rate.limit / 1e9)

    def prompt(self, num_cached_tokens: int, tier: Tier = Tier.DISK) -> list[int]:
        """Return a new prompt, and have a tier hold the blocks of so many of its tokens."""
        prompt = self.random.choices(self.tokens, k=num_cached_tokens + NUM_NEW)
        self.serve(prompt)
        self.in_vram_s = self.serve(prompt).ttft_s
        self.demote(tier)
        return prompt

    def demote(self, tier: Tier = Tier.DISK) -> None:
        """Leave all blocks to host memory or to the disk."""
        disk = self.core.disk
        assert disk is not None
        rate, disk.GBps = disk.GBps, 100.0
        self._come_to_rest()  # the late layers of some blocks may still be on their way to VRAM
        assert self.core.cache.flush(tier, deadline=self.time.now + 60)
        self._come_to_rest()
        disk.GBps = rate
        assert not self.tiers.device.num_cached

    def _come_to_rest(self) -> None:
        while self.core.has_work:
            self.core.step()
            self.core.wait(0.01)

    def serve(
        self,
        prompt: list[int],
        restore: Restore = "auto",
        at_s: float = math.inf,
        event: Callable[[], None] = lambda: None,
    ) -> Served:
        """Serve a request; after `at_s` seconds, unless it was answered, an event happens."""
        self.tiers.settings.restore = restore
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        name, began, has_come = f"{next(self.numbers)}", self.time.now, False
        self.core.add_request(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)
        )
        while True:
            for output in self.core.step():
                assert output.usage is not None
                return Served(self.time.now - began, output.usage)
            if not has_come and self.time.now - began >= at_s:
                event()
                has_come = True
            left_s = math.inf if has_come else began + at_s - self.time.now
            self.core.wait(max(0.0, min(IDLE_WAIT_S, left_s)))

    def ideal_s(self, prompt: list[int], tier: Tier = Tier.DISK) -> float:
        """Return the least time in which the head is computed and the tail is loaded, and the rest.

        The prompt is the last one that `prompt` returned.
        """
        machine, length = self.core.machine, len(prompt) - NUM_NEW
        bytes_per_token = self.core.kv_spec.token_bytes
        GBps = self.GBps if tier is Tier.DISK else self.core.device.machine.up_GBps
        return self.in_vram_s + min(
            max(
                m * machine.token_s + machine.pair_s * pairs(0, m),
                (length - m) * bytes_per_token / (GBps * 1e9),
            )
            for m in range(0, length + 1, 16)
        )

    def num_bad(
        self,
        prompt: list[int],
        tier: Tier = Tier.DISK,
        *,
        seconds: float = 12.0,
        right_after_s: float,
    ) -> int:
        """Serve a request again and again, each time from a tier, as traffic would.

        Returns:
            How many took more than 1.15 x the ideal; none that came after `right_after_s` may.
        """
        began, ideal_s, bad_at = self.time.now, self.ideal_s(prompt, tier), list[float]()
        while (at := self.time.now - began) < seconds:
            if self.serve(prompt).ttft_s > 1.15 * ideal_s:
                bad_at.append(at)
            self.demote(tier)
            self.time.sleep(0.2)
        assert all(at <= right_after_s for at in bad_at), bad_at
        return len(bad_at)


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    with contextlib.ExitStack() as stack:

        def make(machine: Machine = H200_8B, **settings: object) -> Rig:
            time = VirtualTime()
            stack.enter_context(time.patched())
            rig = Rig(machine, time, **settings)
            stack.callback(rig.core.close)
            stack.callback(rig.core.verbs.evict)
            return rig

        yield make


@EACH_LENGTH
@pytest.mark.parametrize(
    ("GBps", "limit_GBps"),
    few([(0.5, None), (3.0, None), (3.0, 0.5), (1.0, None), (2.0, None), (3.0, 1.0)], 3),
)
def test_a_plan_is_no_slower_than_computing_or_loading_and_near_the_ideal(
    make_rig: MakeRig, GBps: float, length: int, limit_GBps: float | None
) -> None:
    limit = {} if limit_GBps is None else {"disk_read_limit": int(limit_GBps * 1e9)}
    rig = make_rig(H200_8B._replace(read_GBps=GBps), **limit)
    prompt, took_s = rig.prompt(length), dict[str, float]()
    for restore in RESTORES:
        took_s[restore] = rig.serve(prompt, restore).ttft_s
        rig.demote()
    assert took_s["auto"] <= 1.02 * min(took_s["compute"], took_s["load"])
    assert took_s["auto"] <= 1.15 * rig.ideal_s(prompt)


@pytest.mark.parametrize(
    ("length", "limit"),
    few(
        [
            *((LENGTHS[1], limit) for limit in (None, "20MB")),
            *((LENGTHS[0], limit) for limit in ("80MB", "5MB", None, "20MB")),
            *((LENGTHS[1], limit) for limit in ("80MB", "5MB")),
        ],
        4,
    ),
)
def test_on_a_cpu_a_plan_is_no_slower_than_computing_or_loading(
    make_rig: MakeRig, length: int, limit: str | None
) -> None:
    """The thread that starts reads computes, too, and is away for the whole of each step."""
    limits = {} if limit is None else {"disk_read_limit": limit}
    sizes = {"device_size": "256MiB", "host_size": "256MiB", "disk_size": "1GiB"}
    rig = make_rig(TWO_CORES, model="tiny-random", block_size=16, **sizes, **limits)
    took_s = dict[str, float]()
    for warm_up in RESTORES[:2]:
        prompt = rig.prompt(length)
        rig.serve(prompt, warm_up)
        rig.demote()
    for restore in RESTORES:
        served = rig.serve(prompt, restore)
        took_s[restore] = served.ttft_s
        rig.demote()
    assert took_s["auto"] <= 1.05 * min(took_s["compute"], took_s["load"]), took_s
    assert served.usage.predicted_s is not None and served.usage.actual_s is not None
    assert served.usage.actual_s <= 1.05 * served.usage.predicted_s


MODELS = {
    "random:qwen3-0.6b": Machine(step_s=0.003, token_s=3.4e-6, pair_s=2.8e-10, issue_long_s=0.001),
    "random:qwen3-4b": Machine(step_s=0.0045, token_s=1.4e-5, pair_s=8.5e-10),
    "random:llama-3.1-8b": H200_8B,
    "random:qwen3-14b": Machine(step_s=0.009, token_s=4.4e-5, pair_s=1.2e-9, issue_long_s=0.026),
}
"""How fast one H200 serves some models, roughly as docs/compute-or-load.md measured it."""


def check_any_machine(make_rig: MakeRig, seed: int, longest: int) -> None:
    """Serve a prefix from disk, from host memory, or its head from there and the rest from disk.

    Model, machine, lengths and block size are drawn. A request that is alone may not be slower than
    if all was computed, or all was loaded.
    """
    drawn = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(drawn.uniform(math.log(low), math.log(high)))

    model, faster = drawn.choice(list(MODELS)), between(0.5, 2.0)
    machine = MODELS[model]._replace(read_GBps=between(0.3, 8), up_GBps=between(1, 60))
    machine = machine._replace(token_s=machine.token_s * faster, pair_s=machine.pair_s * faster)
    block_size = drawn.choice([16, 64])
    length = int(between(1_024, longest)) // block_size * block_size
    share_in_host = drawn.choice([0.0, 1.0, drawn.random()])
    sizes = {"device_size": "20GiB", "host_size": "16GiB", "block_size": block_size}
    rig = make_rig(machine, model=model, **sizes)
    prompt, took_s = rig.prompt(length), dict[str, float]()
    head = int(length * share_in_host) // block_size * block_size
    for restore in RESTORES:
        if head:
            rig.serve(prompt[: head + NUM_NEW], "load")
            rig.demote(Tier.HOST)
        took_s[restore] = rig.serve(prompt, restore).ttft_s
        rig.demote()
    most = 1.02
    if machine.up_GBps < 4 * machine.read_GBps and head < length:
        most = 1.3  # many reads arrive while the head is launched, and only then are they copied
    facts = model, machine, block_size, length, head, took_s
    best_s = min(took_s["compute"], took_s["load"])
    # A few blocks on disk behind a head in host memory are computed if that costs one step more,
    # and the head may be computed to the end of a step.
    most_s = max(most * best_s, best_s + 2 * machine.step_s if head else 0.0)
    assert took_s["auto"] <= most_s, facts


@pytest.mark.parametrize("seed", few(range(12), 4))
def test_on_no_machine_is_a_plan_slower_than_computing_or_loading(
    make_rig: MakeRig, seed: int
) -> None:
    check_any_machine(make_rig, seed, longest=8_192)


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(100, 400))
def test_on_none_of_hundreds_of_machines_is_a_plan_slower_than_computing_or_loading(
    make_rig: MakeRig, seed: int
) -> None:
    check_any_machine(make_rig, seed, longest=40_000)


@with_lengths("GBps", [1.0, 10.0, 2.0, 4.0])
def test_what_host_memory_has_is_computed_in_part_where_pcie_is_slow(
    make_rig: MakeRig, GBps: float, length: int
) -> None:
    rig = make_rig(H200_8B._replace(up_GBps=GBps))
    prompt, served = rig.prompt(length, Tier.HOST), dict[str, Served]()
    for restore in RESTORES:
        served[restore] = rig.serve(prompt, restore)
        rig.demote(Tier.HOST)
    took_s = {restore: each.ttft_s for restore, each in served.items()}
    assert took_s["auto"] <= 1.02 * min(took_s["compute"], took_s["load"])
    # While the engine's thread launches the head, it starts no copies.
    away_s = rig.core.machine.issue_long_s / 4
    assert took_s["auto"] <= 1.05 * rig.ideal_s(prompt, Tier.HOST) + away_s
    usage = served["auto"].usage
    assert usage.cached_tokens_by_tier[Tier.HOST] > 0 < usage.recomputed_tokens


@pytest.mark.parametrize(
    ("GBps", "head"),
    few([(0.5, 2_048), (2.0, 24_576), (0.5, 24_576), (2.0, 2_048), (0.5, 8_192), (2.0, 8_192)], 2),
)
def test_a_head_in_host_memory_is_loaded_where_the_disk_has_the_rest(
    make_rig: MakeRig, GBps: float, head: int
) -> None:
    rig = make_rig(H200_8B._replace(read_GBps=GBps))
    prompt, machine = rig.prompt(LENGTHS[-1]), rig.core.machine
    rig.serve(prompt)  # the rates are learnt
    rig.demote()
    rig.serve(prompt[: head + NUM_NEW], "load")
    rig.demote(Tier.HOST)
    served, bytes_per_token = rig.serve(prompt), rig.core.kv_spec.token_bytes
    copy_s = head * bytes_per_token / (machine.up_GBps * 1e9)
    ideal_s = rig.in_vram_s + min(
        max(
            copy_s + (m - head) * machine.token_s + machine.pair_s * pairs(head, m),
            (LENGTHS[-1] - m) * bytes_per_token / (GBps * 1e9),
        )
        for m in range(head, LENGTHS[-1] + 1, 16)
    )
    assert served.ttft_s <= 1.15 * ideal_s
    by_tier = served.usage.cached_tokens_by_tier
    assert by_tier[Tier.DEVICE] + by_tier[Tier.HOST] >= 0.75 * head


@pytest.mark.parametrize("length", [2_048, 4_992])
def test_the_first_hit_after_a_flood_takes_no_longer_than_those_after_it(
    make_rig: MakeRig, length: int
) -> None:
    """What is known of PCIe then was learnt at the start."""
    rig = make_rig(device_size="6GiB", host_size="24GiB", block_size=16, **RAM_ONLY)
    prompts = [rig.random.choices(range(128_000), k=length + NUM_NEW // 2) for _ in range(3)]
    for prompt in prompts:
        rig.serve(prompt)
    for _ in range(3):
        rig.serve(rig.random.choices(range(128_000), k=20_000))
    hits = [rig.serve(prompt) for prompt in prompts]
    assert [it.usage.cached_tokens_by_tier[Tier.HOST] for it in hits] == [length] * 3
    assert hits[0].ttft_s <= 1.05 * hits[2].ttft_s


@EACH_LENGTH
def test_pcie_that_becomes_busy_and_free_again_delays_few_requests(
    make_rig: MakeRig, length: int
) -> None:
    rig = make_rig()
    prompt, device = rig.prompt(length, Tier.HOST), rig.core.device
    for GBps in (50.0, 5.0, 50.0):
        device.machine = device.machine._replace(up_GBps=GBps)
        assert rig.num_bad(prompt, Tier.HOST, right_after_s=5.0) <= MOST_BAD


@pytest.mark.slow
@pytest.mark.parametrize("GBps", [0.5, 5.0, 50.0])
def test_a_request_that_waits_for_room_begins_no_copies_that_hold_it_up(
    make_rig: MakeRig, GBps: float
) -> None:
    """VRAM is full of blocks that have to be copied down first, over the same slow link."""
    took_s = dict[Restore, float]()
    for restore in set(RESTORES):
        rig = make_rig(H200_8B._replace(up_GBps=GBps), device_size="5GiB")
        prompt = rig.prompt(LENGTHS[-1], Tier.HOST)
        rig.serve(prompt, "load")
        rig.demote(Tier.HOST)
        for _ in range(2):
            rig.serve(rig.random.choices(range(128_000), k=16_000))
        took_s[restore] = rig.serve(prompt, restore).ttft_s
    assert took_s["auto"] <= 1.03 * min(took_s["compute"], took_s["load"])


def test_a_request_waits_no_longer_for_a_disk_that_stalls_than_it_has_patience(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(device_size="1GiB", host_size="256MiB")
    assert rig.core.disk is not None
    rig.core.disk.GBps = 1e-7
    prompts = [rig.random.choices(rig.tokens, k=4_096) for _ in range(4)]
    empty_s, *_, full_s = [rig.serve(prompt).ttft_s for prompt in prompts]
    assert rig.tiers.counters.allocation_waits > 0
    assert full_s < empty_s + 1.1 * PATIENCE_S


@pytest.mark.parametrize(
    ("GBps", "length"),
    few(
        [
            *((3.0, LENGTHS[2]), (0.5, LENGTHS[1])),
            *((0.5, LENGTHS[2]), (3.0, LENGTHS[1])),
            *itertools.product((1.0, 2.0), LENGTHS[1:]),
        ],
        2,
    ),
)
def test_loading_everything_uses_the_whole_disk(
    make_rig: MakeRig, GBps: float, length: int
) -> None:
    rig = make_rig(H200_8B._replace(read_GBps=GBps))
    prompt = rig.prompt(length)
    rig.serve(prompt, "load")
    rig.demote()
    served = rig.serve(prompt, "load")
    num_tokens = served.usage.cached_tokens_by_tier[Tier.DISK]
    assert num_tokens == length
    assert num_tokens * rig.core.kv_spec.token_bytes / served.ttft_s >= 0.92 * GBps * 1e9


@pytest.mark.parametrize("block_size", few([64, 16, 256]))
def test_a_disk_that_slows_down_tenfold_during_a_load_delays_few_requests(
    make_rig: MakeRig, block_size: int
) -> None:
    rig = make_rig(block_size=block_size)
    prompt = rig.prompt(LENGTHS[-1])
    fast = rig.serve(prompt)
    rig.demote()

    def slow_down() -> None:
        assert rig.core.disk is not None
        rig.core.disk.GBps /= 10

    slowed = rig.serve(prompt, at_s=fast.ttft_s / 3, event=slow_down)
    rig.demote()
    assert slowed.ttft_s > fast.ttft_s
    assert (slowed.ttft_s > 1.15 * rig.ideal_s(prompt)) + rig.num_bad(
        prompt, right_after_s=10.0
    ) <= MOST_BAD


@with_lengths("factor", [10.0, 0.001, 0.1])
def test_a_read_rate_that_was_learnt_wrong_delays_few_requests(
    make_rig: MakeRig, factor: float, length: int
) -> None:
    rig = make_rig()
    prompt, rate = rig.prompt(length), rig.tiers.disk_link.read_rate
    for _ in range(2):
        rig.serve(prompt)
        rig.demote()
    rate.bytes_per_s, rate.learnt_at = factor * rate.bytes_per_s, rig.time.now
    assert rig.num_bad(prompt, right_after_s=10.0) <= MOST_BAD
    assert rate.bytes_per_s == pytest.approx(rig.GBps * 1e9, rel=0.1)


@with_lengths("factor", [10.0, 0.001, 0.1, 0.01])
def test_a_rate_of_pcie_that_was_learnt_wrong_delays_few_requests(
    make_rig: MakeRig, factor: float, length: int
) -> None:
    rig = make_rig()
    prompt, rate = rig.prompt(length, Tier.HOST), rig.tiers.device_link.up_rate
    rig.serve(prompt)
    rig.demote(Tier.HOST)
    rate.bytes_per_s, rate.learnt_at = factor * rate.bytes_per_s, rig.time.now
    assert rig.num_bad(prompt, Tier.HOST, right_after_s=5.0) <= MOST_BAD
    assert rate.bytes_per_s == pytest.approx(rig.core.machine.up_GBps * 1e9, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 0.001])
def test_a_rate_of_pcie_that_is_too_low_is_corrected_if_only_the_disk_has_blocks(
    make_rig: MakeRig, factor: float
) -> None:
    rig = make_rig()
    prompt, rate = rig.prompt(8_192), rig.tiers.device_link.up_rate
    rig.serve(prompt)
    rig.demote()
    rate.bytes_per_s, rate.learnt_at = factor * rate.bytes_per_s, rig.time.now
    assert rig.num_bad(prompt, right_after_s=5.0) <= MOST_BAD
    assert rate.bytes_per_s == pytest.approx(rig.core.machine.up_GBps * 1e9, rel=0.1)


@with_lengths("factor", [10.0, 0.01, 3.0, 1 / 3, 0.1])
def test_step_times_that_were_learnt_wrong_delay_few_requests(
    make_rig: MakeRig, factor: float, length: int
) -> None:
    rig = make_rig()
    prompt, rate = rig.prompt(length), rig.tiers.compute_rate
    rig.serve(prompt)
    rig.demote()
    right_s = rate.seconds(0, length)
    steps = [step._replace(seconds=factor * step.seconds) for step in rate.steps]
    for step in [*steps] * 20:
        rate.learn(int(step.num_tokens), step.num_pairs, step.seconds)
    assert rate.seconds(0, length) == pytest.approx(factor * right_s, rel=0.2)
    assert rig.num_bad(prompt, right_after_s=10.0) <= MOST_BAD + 1
    assert rate.seconds(0, length) == pytest.approx(right_s, rel=0.2)


@with_lengths("factor", [2.0, 10.0, 3.0])
def test_a_device_that_becomes_slow_and_fast_again_delays_few_requests(
    make_rig: MakeRig, factor: float, length: int
) -> None:
    rig = make_rig()
    prompt, fast = rig.prompt(length), rig.core.machine
    in_vram_s = rig.in_vram_s
    rig.serve(prompt)
    rig.demote()
    for times in (factor, 1.0):
        rig.core.machine = rig.core.device.machine = fast._replace(
            step_s=times * fast.step_s, token_s=times * fast.token_s, pair_s=times * fast.pair_s
        )
        rig.in_vram_s = times * in_vram_s
        assert rig.num_bad(prompt, right_after_s=10.0) <= MOST_BAD


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0, 48 * 3_600.0])
def test_a_wall_clock_that_jumps_during_a_load_loses_no_token(
    make_rig: MakeRig, jump_s: float
) -> None:
    rig = make_rig()
    prompt, counters = rig.prompt(LENGTHS[1]), rig.tiers.counters
    whole = rig.serve(prompt, "load")
    rig.demote()
    num_loaded = counters.promoted_host_blocks

    def jump() -> None:
        rig.time.wall_time += jump_s

    usage = rig.serve(prompt, "load", at_s=whole.ttft_s / 2, event=jump).usage
    num_loaded = counters.promoted_host_blocks - num_loaded
    has_expired = jump_s > 24 * 3_600
    assert counters.load_failures.keys() == ({"expired"} if has_expired else set())
    assert usage.cached_tokens_by_tier[Tier.DISK] == num_loaded * BLOCK_SIZE
    assert 0 < num_loaded * BLOCK_SIZE <= LENGTHS[1]
    assert (num_loaded * BLOCK_SIZE < LENGTHS[1]) == has_expired
    counted = sum(usage.cached_tokens_by_tier.values())
    assert counted + usage.written_tokens + usage.recomputed_tokens == LENGTHS[1]
    rig.core.cache.check()


def prediction_errors(usages: list[RequestUsage]) -> list[float]:
    """Return the prediction errors of the requests that had a plan."""
    return [error for usage in usages if (error := usage.prediction_error) is not None]


@pytest.mark.parametrize("GBps", [0.5, 2.0])
def test_the_time_of_a_single_request_is_predicted(make_rig: MakeRig, GBps: float) -> None:
    rig, usages = make_rig(H200_8B._replace(read_GBps=GBps)), list[RequestUsage]()
    for length in (LENGTHS[-1], *LENGTHS):
        prompt = rig.prompt(length)
        for _ in range(3):
            usages.append(rig.serve(prompt).usage)
            rig.demote()
    errors = prediction_errors(usages)
    assert len(errors) == len(usages)
    assert statistics.median(errors[3:]) <= 0.1, "the first three taught the rates"


def serve_sessions(
    rig: Rig, count: int, num_turns: int, scale: float
) -> tuple[crowd.Outcome, list[RequestUsage]]:
    """Serve sessions until the first ends; return what they saw, and the usage of each answer."""
    usages, step = list[RequestUsage](), rig.core.step

    def observed() -> list[TokenOutput]:
        outputs = step()
        usages.extend(it.usage for it in outputs if it.finish_reason and it.usage)
        return outputs

    shape = sessions.Shape(num_turns, scale, None)
    scripts = [sessions.write_script(0, session, shape, 128_000) for session in range(count)]
    with mock.patch.object(rig.core, "step", observed):
        it = crowd.Crowd(cast(LLM, SimpleNamespace(core=rig.core)), None)
        return sessions.serve(it, scripts, ignore_progress, ""), usages


def test_a_logged_plan_can_be_made_again(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    prompt = rig.prompt(LENGTHS[-1])
    with caplog.at_level(logging.DEBUG, logger="tieredkv.cache.promotion"):
        rig.serve(prompt)
        serve_sessions(rig, 4, 2, 8.0)
    texts = [it.getMessage().removeprefix("plan ") for it in caplog.records if it.args]
    texts = [text for text in texts if text.startswith("{")]
    num_divided = 0
    for text in texts:
        logged, splits = replay(text)
        assert splits == logged.splits
        num_divided += sum(bool(each.loads) for each in logged.demands)
    assert num_divided > 10


SMALL_RAM = {"device_size": "2GiB", "host_size": "1GiB", "block_size": 16}
"""For sessions scaled to an eighth: VRAM and host memory together do not hold all of them."""


@pytest.mark.parametrize("lookup_s", [0.0005, 0.002])
def test_a_request_that_the_disk_is_asked_about_misses_no_step(
    make_rig: MakeRig, lookup_s: float
) -> None:
    """It comes while another one generates; the disk has nothing of it."""
    prompts = [random.Random(name).choices(range(128_000), k=512) for name in range(2)]
    asks = [crowd.Ask(at_s, int(at_s > 0), 0, prompts[at_s > 0], 200) for at_s in (0.0, 0.5)]
    ttft_ms = dict[str, float]()
    for name, more in {"none": RAM_ONLY, "disk": {}}.items():
        rig = make_rig(H200_8B._replace(lookup_s=lookup_s), **more)
        it = crowd.Crowd(cast(LLM, SimpleNamespace(core=rig.core)), None)
        outcome = it.serve(asks, lambda _: None)
        [ttft_ms[name]] = [answer.ttft_ms for answer in outcome.answers if answer.client == 1]
    assert ttft_ms["disk"] - ttft_ms["none"] < 1e3 * H200_8B.step_s / 2


def test_a_hit_in_host_memory_waits_for_no_long_step_that_is_issued_after_it_came(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    scheduler = rig.core.scheduler
    hit = rig.prompt(LENGTHS[1], Tier.HOST)
    cold = rig.random.choices(range(128_000), k=LENGTHS[2])
    ready_s = rig.serve(hit).ttft_s
    rig.demote(Tier.HOST)
    it = crowd.Crowd(cast(LLM, SimpleNamespace(core=rig.core)), None)
    asks = [crowd.Ask(0.0, 0, 0, cold, 2), crowd.Ask(0.05, 1, 0, hit, 2)]
    outcome = it.serve(asks, lambda _: None)
    [ttft_ms] = [answer.ttft_ms for answer in outcome.answers if answer.client == 1]
    alone = scheduler.max_num_alone_tokens  # of the step in which it comes
    beside = int(2 * BESIDE_BRIEF * scheduler.max_num_batched_tokens)  # while it is copied
    assert ttft_ms / 1e3 < rig.tiers.compute_rate.seconds(0, alone + beside) + ready_s


def test_half_of_the_times_in_a_crowd_are_predicted_within_a_tenth(make_rig: MakeRig) -> None:
    _, usages = serve_sessions(make_rig(**SMALL_RAM), 8, 20, 8.0)
    errors = prediction_errors(usages)
    assert len(errors) >= 30
    assert statistics.median(errors[3:]) <= 0.1, "the first three taught the rates"


def test_a_crowd_that_ram_does_not_hold_is_served_no_slower_with_a_disk(make_rig: MakeRig) -> None:
    rates = dict[str, float]()
    for name, more in {"none": RAM_ONLY, "disk": {}}.items():
        rig = make_rig(**SMALL_RAM, **more)
        outcome, usages = serve_sessions(rig, 8, 15, 8.0)
        assert len(usages) == len(outcome.answers)
        from_disk = sum(answer.by_tier[Tier.DISK] for answer in outcome.answers)
        assert (from_disk > 0) == (name == "disk")
        rates[name] = len(outcome.answers) / outcome.wall_s
        rig.core.cache.check()
        rig.core.scheduler.check()
        assert rig.tiers.device.num_used == rig.tiers.host.num_used == 0
    assert rates["disk"] >= 0.98 * rates["none"]
