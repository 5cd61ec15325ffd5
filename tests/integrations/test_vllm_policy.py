"""vLLM's own manager with our policy: pins are kept, and without pins it is vLLM's own order."""

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden import told
from tests.integrations.engines import HAS_VLLM, RealEngine, key_of
from tests.levels import few

IS_NEW = HAS_VLLM and not RealEngine.is_older
needs_vllm = pytest.mark.skipif(not IS_NEW, reason="vLLM 0.33 is not here")
CAPACITY = 8


@pytest.mark.skipif(IS_NEW, reason="vLLM 0.33 is here")
def test_without_a_new_enough_vllm_one_sentence_says_what_to_do() -> None:
    code = "import tieredkv.integrations.vllm_policy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told(re.sub(r"\(.*", "(CAUSE)", done.stderr.splitlines()[-1]))


class Clock:
    """The clock of the policy."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from tieredkv.integrations import vllm_policy

    clock = Clock()
    monkeypatch.setattr(vllm_policy, "time", clock)
    return clock


class Memory:
    """vLLM's memory of `CAPACITY` chunks, and requests that fill it."""

    def __init__(self, policy: str = "RetentionCachePolicy", capacity: int = CAPACITY) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        path = "tieredkv.integrations.vllm_policy" if policy[0].isupper() else None
        self.manager = CPUOffloadingManager(capacity, policy, path)
        self._num_requests = 0

    def request(self, keys: list[bytes], **told: Any) -> Any:
        """Return the context of a new request for a prompt of these chunks."""
        from vllm.v1.kv_offload.base import ReqContext

        self._num_requests += 1
        params = {"tieredkv": told} if told else None
        context = ReqContext(f"r{self._num_requests}", params)
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (position + 1))
        self.manager.on_new_request(context)
        return context

    def store(self, keys: list[bytes], context: Any) -> list[bytes] | None:
        """Compute chunks; return those that were evicted for them, None if there was no room."""
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return None
        self.manager.complete_store(output.keys_to_store, context)
        return list(output.evicted_keys)

    def serve(self, name: str, length: int, **told: Any) -> list[bytes] | None:
        """Serve a whole request; return what was evicted for it."""
        keys = chain(name, length)
        context = self.request(keys, **told)
        evicted = self.store(keys, context)
        self.manager.on_request_finished(context)
        return evicted

    def held(self, name: str, length: int) -> int:
        """Return how many chunks of a prompt are there."""
        context = self.request([])
        found = [self.manager.lookup(key, context).name for key in chain(name, length)]
        return found.count("HIT")


def chain(name: str, length: int) -> list[bytes]:
    return [key_of(name, position) for position in range(length)]


@needs_vllm
@pytest.mark.parametrize(
    ("told", "for_s"),
    [
        ({"pin_s": 300.0}, 300),
        ({"pin_s": 60, "retention": "24h"}, 60),
        ({"retention": "1h"}, 3600),
        ({"retention": "5m"}, 300),
        ({"pin_s": 1e9}, 86400),
    ],
    ids=str,
)
def test_pinned_chunks_outlive_a_flood_until_the_pin_ends(
    told: dict[str, Any], for_s: int, clock: Clock
) -> None:
    memory = Memory()
    memory.serve("pinned", 3, **told)
    for number in range(9):
        assert memory.serve(f"flood{number}", 2) is not None
    assert memory.held("pinned", 3) == 3
    clock.now += for_s - 1
    memory.serve("flood", 5)
    assert memory.held("pinned", 3) == 3
    clock.now += 2
    memory.serve("later", 5)
    assert memory.held("pinned", 3) == 0


@needs_vllm
@pytest.mark.parametrize(
    "told",
    [
        {"retention": "24h"},
        {"retention": "in_memory"},
        {"pin_s": -1},
        {"pin_s": "300"},
        {"pin_s": True},
        {"retention": ["1h"]},
        {"pin_s": float("nan")},
    ],
    ids=str,
)
def test_what_does_not_pin_is_evicted_in_its_turn(told: dict[str, Any], clock: Clock) -> None:
    memory = Memory()
    memory.serve("a", 3, **told)
    memory.serve("b", 5)
    assert memory.serve("c", 3) == chain("a", 3)[::-1]


@needs_vllm
def test_a_use_pins_again_and_by_a_longer_time_only(clock: Clock) -> None:
    memory, keys = Memory(), chain("a", 2)
    memory.serve("a", 2, pin_s=100)
    clock.now += 90
    memory.manager.touch(keys, memory.request(keys, pin_s=100))
    memory.manager.touch(keys, memory.request(keys, pin_s=1))
    clock.now += 90
    memory.serve("flood", 8 - 2)
    memory.serve("flood2", 6)
    assert memory.held("a", 2) == 2


@needs_vllm
def test_at_most_half_is_pinned_and_then_pins_give_way(clock: Clock) -> None:
    memory = Memory()
    memory.serve("a", 4, pin_s=100)
    assert memory.serve("b", 4, pin_s=100) == []
    assert memory.manager._policy.num_pinned == CAPACITY // 2
    assert memory.serve("c", 4) == chain("b", 4)[::-1]
    evicted = memory.serve("d", 6)  # more than what is not pinned
    assert evicted == [*chain("c", 4)[::-1], *chain("a", 4)[:1:-1]]
    assert memory.held("a", 4) == 2


@needs_vllm
def test_chunks_in_transfer_are_never_evicted_and_nothing_changes_then(clock: Clock) -> None:
    memory, keys = Memory(), chain("a", 6)
    memory.serve("a", 6, pin_s=100)
    context = memory.request(keys)
    memory.manager.prepare_load(keys, context)
    assert memory.serve("b", 3) is None
    assert memory.held("a", 6) == 6
    memory.manager.complete_load(keys, context)
    assert memory.serve("b", 3) == [keys[5]]


@needs_vllm
def test_a_store_that_fails_and_a_reset_leave_nothing_behind(clock: Clock) -> None:
    memory, keys = Memory(), chain("a", 3)
    context = memory.request(keys, pin_s=100)
    memory.manager.prepare_store(keys, context)
    memory.manager.complete_store(keys, context, success=False)
    assert memory.manager._policy.num_pinned == 0
    memory.serve("b", 4, pin_s=100)
    memory.manager.reset_cache()
    assert memory.manager._policy.num_pinned == 0
    assert memory.serve("c", 8) == []
    memory.manager._policy.check()


@needs_vllm
@pytest.mark.parametrize("has_pins", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("seed", few(range(40), 4))
def test_random_requests(seed: int, has_pins: bool, clock: Clock) -> None:
    """Without pins, each step evicts what vLLM's own policy evicts.

    With pins, no chunk that is pinned goes while another could.
    """
    chance = random.Random(seed)
    ours, theirs = Memory(capacity=12), Memory("lru", capacity=12)
    both = [ours] if has_pins else [ours, theirs]
    open_requests: list[tuple[list[bytes], list[Any]]] = []
    for _ in range(300):
        clock.now += chance.random()
        step = chance.choice(["new", "store", "store", "load", "end", "touch", "reset"])
        if step == "reset" and chance.random() > 0.1:
            continue
        if step == "new":
            keys = chain(f"p{chance.randrange(6)}", chance.randint(1, 6))
            pin = {"pin_s": chance.choice([1, 5, 20])}
            told = pin if has_pins and chance.random() < 0.4 else {}
            contexts = [each.request(keys, **told) for each in both]
            open_requests.append((keys, contexts))
            continue
        if step == "reset":
            for each in both:
                each.manager.reset_cache()
            continue
        if not open_requests:
            continue
        at = chance.randrange(len(open_requests))
        keys, contexts = open_requests[at]
        some = keys[: chance.randint(1, len(keys))]
        results: list[Any] = []
        for each, context in zip(both, contexts, strict=True):
            manager = each.manager
            if step == "store":
                policy = manager._policy
                before = {key for key in some if policy.get(key) is None}
                plain = _plain(policy, clock.now) - {*some} if has_pins else set()
                results.append(each.store(some, context))
                if has_pins and results[-1] and plain - {*results[-1]}:
                    assert {*results[-1]} <= plain, "a pinned chunk went before another"
                assert results[-1] is None or all(policy.get(key) for key in before)
            elif step == "load":
                there = [key for key in some if manager.lookup(key, context).name == "HIT"]
                manager.prepare_load(there, context)
                manager.complete_load(there, context)
            elif step == "touch":
                manager.touch(some, context)
            elif step == "end":
                manager.on_request_finished(context)
        assert has_pins or results[:1] == results[1:]
        if step == "end":
            del open_requests[at]
        ours.manager._policy.check()
        assert ours.manager._policy.num_pinned <= 6


def _plain(policy: Any, now: float) -> set[bytes]:
    """Return the chunks that are neither pinned now nor in transfer."""
    chunks = policy._order._chunks
    return {key for key, each in chunks.items() if each.is_idle and each.pinned_until <= now}


@needs_vllm
def test_pins_hold_above_our_tier_as_documented(tmp_path: Path) -> None:
    policy = {
        "eviction_policy": "RetentionCachePolicy",
        "cache_policy_module_path": "tieredkv.integrations.vllm_policy",
    }
    tier = {"disk_dir": str(tmp_path / "kv"), "weights_id": "w"}
    engine = RealEngine(tmp_path, tier, extra=policy)
    try:
        pinned = engine.chain("pinned", 4)
        engine.store(pinned, None, pin_s=300.0)
        for number in range(4):
            engine.store(engine.chain(f"flood{number}", 8), None)
        assert engine.hits(pinned) == [True] * 4
        assert engine.hits(engine.chain("flood0", 8)) == [False] * 8
    finally:
        engine.close()
