"""The order in which the engine issues steps and collects their outputs."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.prompts import prompt
from tests.waiting import HANG_S, wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.cache import lookups
from tieredkv.engine import core, quick_tenants
from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import TokenOutput
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.tier import Lent
from tieredkv.types import Tier


def test_the_python_api_leaves_the_callers_garbage_collector_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in ("freeze", "unfreeze", "set_threshold", "disable", "enable"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: called.append(name))
    with LLM("tiny-random", device_size="4MiB", host_size="4MiB") as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert called == []


def test_a_quick_request_is_in_the_very_next_step_of_a_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick_tenants, "SHORT_STEPS_S", 1e9)
    sizes: dict[str, Any] = {"device_size": "32MiB", "host_size": "8MiB", "block_size": 16}
    with LLM("tiny-random", max_num_batched_tokens=512, **sizes) as llm:
        engine, issued, execute = llm.core, list[int](), llm.core._runner.execute

        def count(rows: list[BatchRow], *args: Any) -> Any:
            issued.append(len(rows))
            return execute(rows, *args)

        monkeypatch.setattr(engine._runner, "execute", count)

        def add(name: str, length: int) -> None:
            tokens = [len(name) + index % 200 for index in range(length)]
            params = SamplingParams(max_tokens=1, temperature=0.0)
            request = llm.make_request(tokens, params, tenant=name.split()[0])
            engine.add_request(request)
            names[request.request_id] = name

        def step() -> set[str]:
            return {names[output.request_id] for output in engine.step()}

        names: dict[str, str] = {}
        add("flood", 4000)
        add("quiet", 40)
        while "quiet" not in step():
            pass
        for number in range(5):
            name, since = f"quiet {number}", len(issued)
            while len(issued) == since:  # the step that is in progress when the request arrives
                assert step() == set()
            add(name, 40)
            since = len(issued)
            while name not in step():
                pass
            assert len(issued) == since + 1
        engine.abort_all()
        while engine.has_work:
            engine.step()


class Busy:
    """An engine with a request whose blocks the disk has and is slow to read.

    Attributes:
        issued: the number of rows of each step.
        busy_s: for how long the device is said to be busy.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm, self.core, self.busy_s, self.issued = llm, llm.core, 0.0, list[int]()
        self.held: list[Lent] = []
        execute, store = self.core._runner.execute, self.core.parts.tiers.store
        assert store is not None
        self.load = store.load
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self.tokens = [index % 200 for index in range(500)]
        [self.cold] = llm.generate(self.tokens, params)
        assert llm.demote("disk")

        def count(rows: list[BatchRow], *args: Any) -> Any:
            self.issued.append(len(rows))
            return execute(rows, *args)

        monkeypatch.setattr(self.core._runner, "execute", count)
        monkeypatch.setattr(self.core._timer, "busy_s", lambda: self.busy_s)
        monkeypatch.setattr(store, "load", self.held.extend)
        self.core.add_request(llm.make_request(self.tokens, params))
        while not self.held:
            self.core.step()
            self.core.wait(0.01)

    def let_go(self) -> None:
        self.load(self.held)

    def finish(self) -> list[TokenOutput]:
        outputs = []
        while self.core.has_work:
            outputs += self.core.step()
            self.core.wait(0.01)
        return outputs


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Busy]:
    sizes: dict[str, Any] = {"device_size": "16MiB", "host_size": "16MiB", "load_timeout": HANG_S}
    monkeypatch.setattr(lookups, "LOOKUP_TIMEOUT_S", HANG_S)
    with LLM(
        "tiny-random", retention="24h", disk_dir=str(tmp_path), restore="load", **sizes
    ) as llm:
        yield Busy(llm, monkeypatch)


@pytest.mark.parametrize("is_loading", [True, False])
def test_a_step_is_issued_only_when_the_last_is_nearly_computed(
    busy: Busy, is_loading: bool
) -> None:
    if not is_loading:
        busy.let_go()
        busy.finish()
        busy.issued.clear()
    busy.busy_s = 1.0
    busy.core.add_request(busy.llm.make_request([7] * 40, SamplingParams(max_tokens=1)))
    for _ in range(20):
        assert busy.core.step() == []
        busy.core.wait(0.01)
    assert busy.issued == []
    busy.busy_s = core.ISSUE_AHEAD_S
    while not busy.core.step():
        busy.core.wait(0.01)
    assert busy.issued == [1], "the new request was taken in, and waits for no blocks"
    if is_loading:
        busy.let_go()
        [output] = busy.finish()
        assert output.token_ids == busy.cold.token_ids


def test_the_longer_the_steps_that_were_issued_the_earlier_the_next_one_is_issued(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(busy.core._timer), "issued_s", 1.0)
    busy.core.add_request(busy.llm.make_request([7] * 40, SamplingParams(max_tokens=1)))
    nearly_s = core.ISSUE_AHEAD_S + core.ISSUE_AHEAD_SHARE
    busy.busy_s = nearly_s + 0.01
    for _ in range(20):
        assert busy.core.step() == []
        busy.core.wait(0.01)
    assert busy.issued == []
    busy.busy_s = nearly_s
    while not busy.core.step():
        busy.core.wait(0.01)
    assert busy.issued == [1]
    busy.let_go()
    busy.finish()


@pytest.mark.parametrize("busy_s", [0.0, 1.0])
def test_an_engine_that_waits_for_the_disk_sleeps_between_its_plans(
    busy: Busy, monkeypatch: pytest.MonkeyPatch, busy_s: float
) -> None:
    slept, wait, busy.busy_s = list[float](), busy.core._wake.wait, busy_s
    busy.core._wake.clear()

    def sleep(seconds: float) -> bool:
        slept.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(busy.core._wake, "wait", sleep)
    for num_steps in range(1, 50):
        busy.core.step()
        busy.core.wait(1.0)
        assert len(slept) >= num_steps
    assert min(slept) > 0 and max(slept) <= core.PLAN_AGAIN_S
    busy.let_go()


def test_logits_are_the_caller_s_to_keep_though_the_next_step_was_issued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM("tiny-random", device_size="32MiB", host_size="8MiB") as llm:
        runner, last, told = llm.core._runner, list[torch.Tensor](), list[torch.Tensor]()
        execute, was_overwritten = runner.execute, list[bool]()

        @torch.inference_mode()
        def reuse(rows: list[BatchRow], *args: Any) -> Any:
            was_overwritten.append(len(told) < len(last))
            for logits in last:
                logits.zero_()
            output = execute(rows, *args)
            last[:] = [output.logits]
            return output

        monkeypatch.setattr(runner, "execute", reuse)
        llm.core.on_logits = lambda _id, row: told.append(row)
        params = SamplingParams(max_tokens=6, temperature=0.0)
        [output] = llm.serve([llm.make_request(list(range(20)), params)])
    assert any(was_overwritten)
    assert [int(row.argmax()) for row in told] == output.token_ids


def test_once_the_disk_has_told_what_it_has_no_request_asks_for_it(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"device_size": "32MiB", "host_size": "8MiB", "disk_size": "64MiB"}
    sizes |= {"disk_dir": str(tmp_path / "store"), "retention": "24h", "restore": "load"}
    with LLM("tiny-random", **sizes) as llm:
        llm.serve([llm.make_request(list(range(40)), SamplingParams(max_tokens=1))])
    with LLM("tiny-random", **sizes) as llm:
        tiers, asked = llm.core.parts.tiers, list[int]()
        assert tiers.store is not None

        def is_told() -> bool:
            llm.core.step()
            return tiers.presence.is_whole

        wait_until(is_told)
        with mock.patch.object(tiers.store, "lookup", asked.append):
            (answer,) = llm.serve([llm.make_request(list(range(40)), SamplingParams(max_tokens=1))])
        assert answer.usage is not None
        assert answer.usage.cached_tokens_by_tier[Tier.DISK] > 0
        assert asked == []


def test_a_part_of_a_block_that_another_request_completes_first_does_not_count_as_cached() -> None:
    sizes: dict[str, Any] = {"device_size": "4MiB", "host_size": "1MiB", "block_size": 16}
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM("tiny-random", max_num_batched_tokens=96, **sizes) as llm:
        long = prompt(1, 300)
        prompts = [prompt(2, 84), long, long[:16] + prompt(3, 4)]
        requests = [llm.make_request(tokens, params) for tokens in prompts]
        answers = {each.request_id: Answer(each, llm.tokenizer) for each in requests}
        num_before = llm.core.scheduler.num_computed_tokens
        for request in requests[:2]:
            llm.core.add_request(request)
        outputs = llm.core.step()  # the second request gets the 12 tokens that the first one leaves
        llm.core.add_request(requests[2])  # it is brief, and computes the whole block before that
        while llm.core.has_work:
            outputs += llm.core.step()
            llm.core.wait(0.01)
        for output in outputs:
            answers[output.request_id].take(output)
        usages = [answer.usage for answer in answers.values()]
        assert [usage.cached_tokens for usage in usages] == [0, 4, 0]
        assert [usage.recomputed_tokens for usage in usages] == [0, 12, 0]
        num_claimed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
        assert num_claimed == llm.core.scheduler.num_computed_tokens - num_before
