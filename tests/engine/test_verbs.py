"""What operators ask is done in slices, between which steps go on and blocks come and go."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fake_store import Rig, chain_of, root_of
from tieredkv.cache import block_lists, catalog, operations
from tieredkv.config import Settings
from tieredkv.engine import chains, slices, verbs
from tieredkv.engine.chains import Chains
from tieredkv.engine.engine_messages import EngineRequest, Tokenize, Tokenized
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.slices import Slices, telling
from tieredkv.engine.tier_stats import TierStats
from tieredkv.engine.verbs import Verbs
from tieredkv.operate.calls import Call, Df, EvictFilter, Inspect, Ls
from tieredkv.operate.models import KnownModel
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import starts_in
from tieredkv.storage.keys.names import Names
from tieredkv.types import KVSpec, LayerKV, Tier

NUM_BLOCKS = 40
AT_MOST = 4
"""Blocks that a piece handles in these tests."""

MODEL = KnownModel(name="m", fingerprint="00", dtype="bfloat16", block_size=1, hash_algo="sha256")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one piece of few blocks be done at once."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    monkeypatch.setattr(block_lists, "PART_BLOCKS", AT_MOST)
    for module in (catalog, chains, operations):
        monkeypatch.setattr(module, "PIECE_BLOCKS", AT_MOST)
    for module in (chains, operations, verbs):
        monkeypatch.setattr(module, "SCANNED_BLOCKS", AT_MOST)


class Operator:
    """Asks an engine with its own tiers.

    Attributes:
        parts: those of the answer that was told last.
        is_answered: whether the answer is complete.
    """

    def __init__(self, rig: Rig) -> None:
        stats = cast(TierStats, SimpleNamespace(read=lambda: {"block_bytes": 64}))
        spec = KVSpec(layers=[LayerKV(1, 1)], dtype="bfloat16", block_size=1)
        work, made = Slices(), Chains(Settings(), spec, b"\0", rig.clock)
        prompts = PromptInspections(rig.cache.operations, made, work)
        self.verbs, self._rig = Verbs(rig.cache.operations, stats, prompts, MODEL, work), rig
        self.parts = list[dict[str, Any]]()
        self.is_answered = False

    def ask(self, call: Call) -> Iterator[None]:
        """Have a verb carried out; yield between two steps until it is answered."""
        self.verbs.operate(call, self._take)
        while not self.is_answered:
            self.verbs.answer_control()
            self._rig.check()
            yield

    def answer(self, call: Call) -> dict[str, Any]:
        """Return the last part of an answer."""
        for _ in self.ask(call):
            pass
        return self.parts[-1]

    def _take(self, part: dict[str, Any], has_more: bool) -> None:
        self.parts.append(part)
        self.is_answered = not has_more


@pytest.fixture
def rig() -> Rig:
    """Return tiers with one chain of `NUM_BLOCKS` blocks in VRAM."""
    rig = Rig(num_blocks=NUM_BLOCKS + 2, num_pages=NUM_BLOCKS, has_store=False)
    rig.run("a", NUM_BLOCKS)
    return rig


CHAIN = chain_of("a", NUM_BLOCKS)
FILTERS = {
    "all": EvictFilter(all=True),
    "starts": EvictFilter(starts=tuple(each[:16] for each in CHAIN)),
    "namespace": EvictFilter(namespace_prefix=b"ns".hex()),
    "older": EvictFilter(older_than_s=0.0),
    "tier": EvictFilter(tiers=(Tier.DEVICE,)),
}


@pytest.mark.parametrize("name", FILTERS)
def test_no_step_evicts_more_than_a_few_blocks(rig: Rig, name: str) -> None:
    operator, counts = Operator(rig), [NUM_BLOCKS]
    for _ in operator.ask(FILTERS[name]):
        counts.append(rig.tiers.device.num_cached)
    drops = [before - after for before, after in pairwise(counts)]
    assert max(drops) == AT_MOST and sum(drops) == NUM_BLOCKS
    answer = operator.parts[-1]
    assert answer["evicted_blocks"] == NUM_BLOCKS
    assert answer["freed_bytes"] == NUM_BLOCKS * rig.tiers.vram_bytes
    assert (answer["unknown_ids"], answer["disk"]) == ([], None)


@pytest.mark.parametrize("name", FILTERS)
def test_a_dry_run_counts_few_blocks_at_once_and_evicts_none(rig: Rig, name: str) -> None:
    wanted = EvictFilter(
        all=FILTERS[name].all,
        starts=FILTERS[name].starts,
        namespace_prefix=FILTERS[name].namespace_prefix,
        older_than_s=FILTERS[name].older_than_s,
        tiers=FILTERS[name].tiers,
        dry_run=True,
    )
    operator = Operator(rig)
    assert sum(1 for _ in operator.ask(wanted)) >= NUM_BLOCKS / AT_MOST
    assert operator.parts[-1]["evicted_blocks"] == NUM_BLOCKS == rig.tiers.device.num_cached


def test_no_step_sends_more_than_a_few_blocks_down(rig: Rig) -> None:
    operator, counts = Operator(rig), [0]
    for _ in operator.ask(EvictFilter(all=True, to="host")):
        counts.append(len(rig.cache._departures))
    sent = [after - before for before, after in pairwise(counts)]
    assert max(sent) == AT_MOST and sum(sent) == NUM_BLOCKS
    assert operator.parts[-1]["evicted_blocks"] == NUM_BLOCKS
    assert operator.parts[-1]["refused_blocks"] == 0


def test_no_step_lists_more_than_a_few_blocks(rig: Rig) -> None:
    operator = Operator(rig)
    for _ in operator.ask(Ls()):
        pass
    first, *parts, last = operator.parts
    assert first["model"]["name"] == "m" and last == {}
    assert [len(part["tiers"]) for part in parts] == [AT_MOST] * (NUM_BLOCKS // AT_MOST)


def test_no_step_looks_up_more_than_a_few_blocks_of_a_prompt(rig: Rig) -> None:
    operator, asked = Operator(rig), list[Tokenize]()
    prompts = operator.verbs.prompts
    prompts.on_prompt = asked.append
    asking = operator.ask(Inspect(prompt="text"))
    next(asking)
    params = SamplingParams(max_tokens=1)
    request = EngineRequest(request_id="p", prompt_token_ids=[*range(NUM_BLOCKS)], params=params)
    prompts.go_on(Tokenized(asked[0].id, request))
    num_steps = sum(1 for _ in asking)
    assert num_steps >= 3 * NUM_BLOCKS / AT_MOST + 5, "hashes, roots, tiers, and five predictions"
    [report] = operator.parts
    assert (report["prompt_tokens"], report["reason"]) == (NUM_BLOCKS, "never_seen")
    assert report["predicted_ttft_ms"].keys() == {"compute", "device", "host", "disk", "planned"}


def test_the_figures_of_the_tiers_take_one_piece(rig: Rig) -> None:
    operator = Operator(rig)
    assert len(list(operator.ask(Df()))) == 1
    assert operator.parts == [{"block_bytes": 64, "writer_pid": None}]


def test_blocks_that_are_not_there_evict_nothing(rig: Rig) -> None:
    others = EvictFilter(starts=(b"x" * 16,)), EvictFilter(starts=())
    for wanted in (*others, EvictFilter(ids=(CHAIN[7].hex(),)), EvictFilter(filter="blocks>0")):
        answer = Operator(rig).answer(wanted)
        assert answer["evicted_blocks"] == 0
        assert rig.tiers.device.num_cached == NUM_BLOCKS


def test_a_block_that_leaves_during_an_eviction_is_not_counted_and_keeps_its_reason(
    rig: Rig,
) -> None:
    operator = Operator(rig)
    asking = operator.ask(EvictFilter(all=True))
    next(asking)
    rig.tiers.drop(CHAIN[0], "expired")
    for _ in asking:
        pass
    assert operator.parts[-1]["evicted_blocks"] == NUM_BLOCKS - 1
    assert rig.tiers.catalog.miss_reasons.why(CHAIN[0], rig.clock.now()) == "expired"
    assert rig.tiers.catalog.miss_reasons.why(CHAIN[1], rig.clock.now()) == "admin"


def test_a_request_that_ends_during_an_eviction_keeps_its_bytes_until_then_and_no_more() -> None:
    rig = Rig(num_blocks=16, has_store=False)
    user = rig.start("a", 12)
    rig.compute(user)
    operator = Operator(rig)
    asking = operator.ask(EvictFilter(all=True))
    next(asking)
    rig.verify(user)
    rig.end(user)
    for _ in asking:
        pass
    assert operator.parts[-1]["evicted_blocks"] == 12
    assert rig.tiers.device.num_cached == 0
    rig.check_nothing_is_held()


def test_a_block_that_is_computed_during_an_eviction_may_stay() -> None:
    rig = Rig(num_blocks=32, has_store=False)
    rig.run("a", 12)
    operator = Operator(rig)
    asking = operator.ask(EvictFilter(all=True))
    next(asking)
    rig.run("b", 3)
    for _ in asking:
        pass
    assert operator.parts[-1]["evicted_blocks"] == 12
    assert (rig.on_device("a", 12), rig.on_device("b", 3)) == ([], [0, 1, 2])


def test_a_block_that_is_loaded_from_disk_again_during_an_eviction_goes_too() -> None:
    rig = Rig(num_blocks=32, num_pages=32)
    rig.store.put("a", 12)
    assert rig.run("a", 12) == 0
    operator = Operator(rig)
    asking = operator.ask(EvictFilter(all=True))
    for _ in range(3):
        next(asking)
    assert len(rig.on_device("a", 12)) < 12
    assert rig.run("a", 12) == 0, "they are loaded again"
    for _ in asking:
        pass
    assert (rig.on_device("a", 12), rig.on_host("a", 12)) == ([], [])


def test_an_operator_calls_blocks_by_the_names_that_the_store_has_for_them() -> None:
    rig, names = Rig(), Names(b"k" * 32)
    rig.store.names = names
    rig.run("a", 4)
    rig.run("b", 2)
    hashes = chain_of("a", 4)
    hidden = names.hide([root_of("a"), *hashes])
    operator = Operator(rig)
    operator.answer(Ls())
    told, shown = starts_in(RamBlocks(operator.parts[1:]).table.blocks), {*hidden[1:]}
    assert {*told} == {each[:16] for each in shown.union(names.hide(chain_of("b", 2)))}
    for blocks, num_blocks in ((hashes, 0), (hidden[1:], 4)):
        wanted = EvictFilter(starts=tuple(each[:16] for each in blocks))
        assert Operator(rig).answer(wanted)["evicted_blocks"] == num_blocks
    assert {entry.block_hash for entry in rig.tiers.catalog.entries()} == {*chain_of("b", 2)}


def test_no_step_reveals_more_than_a_few_names_whatever_a_question_has() -> None:
    revealed = list[int]()

    class NotedNames(Names):
        def reveal(self, names: Sequence[bytes]) -> list[bytes]:
            revealed.append(len(names))
            return super().reveal(names)

    rig = Rig()
    rig.store.names = NotedNames(b"k" * 32)
    steps = [*Operator(rig).ask(EvictFilter(starts=(b"n" * 16,) * 10 * AT_MOST))]
    assert revealed == [AT_MOST] * 10
    assert len(steps) > 10


def test_works_that_are_asked_for_together_go_on_by_turns(rig: Rig) -> None:
    operator, answers = Operator(rig), list[str]()

    def tell(name: str, has_more: bool) -> None:
        answers.extend([] if has_more else [name])

    operator.verbs.operate(Ls(), lambda _, has_more: tell("ls", has_more))
    operator.verbs.operate(Df(), lambda _, has_more: tell("df", has_more))
    while len(answers) < 2:
        operator.verbs.answer_control()
    assert answers == ["df", "ls"]


def test_a_long_answer_tells_that_it_is_still_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "BEAT_S", -1.0)

    def answer() -> slices.Answer:
        yield None
        yield {"part": 1}
        return {"part": 2}

    told = list[tuple[dict[str, Any], bool]]()
    for _ in telling(answer(), lambda *part: told.append(part)):
        pass
    assert told == [({}, True), ({"part": 1}, True), ({"part": 2}, False)]
