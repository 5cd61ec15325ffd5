"""The order in which the engine issues steps and collects their outputs."""

from typing import Any

import pytest

from tieredkv import LLM, SamplingParams
from tieredkv.engine import scheduler
from tieredkv.engine.step_buffers import BatchRow


def test_a_quick_request_is_in_the_very_next_step_of_a_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "SHORT_STEPS_S", 1e9)
    sizes: dict[str, Any] = {"device_size": "32MiB", "host_size": "8MiB", "block_size": 16}
    with LLM("tiny-random", max_num_batched_tokens=512, **sizes) as llm:
        core, issued, execute = llm.core, list[int](), llm.core._runner.execute

        def count(rows: list[BatchRow], *args: Any) -> Any:
            issued.append(len(rows))
            return execute(rows, *args)

        monkeypatch.setattr(core._runner, "execute", count)

        def add(name: str, length: int) -> None:
            tokens = [len(name) + index % 200 for index in range(length)]
            params = SamplingParams(max_tokens=1, temperature=0.0)
            request = llm.make_request(tokens, params, tenant=name.split()[0])
            core.add_request(request)
            names[request.request_id] = name

        def step() -> set[str]:
            return {names[output.request_id] for output in core.step()}

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
        core.abort_all()
        while core.has_work:
            core.step()
