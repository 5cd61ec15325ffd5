"""Room in VRAM for pages of layers with windows, on a modelled machine."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.modelled import Machine, ModelledCore, VirtualTime
from tieredkv.config import load_settings
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.step_buffers import BatchRow, StepOutput

MOE = Machine(step_s=0.012, token_s=1.5e-5, pair_s=3e-10, decode_s=2e-8, issue_long_s=0.06)
"""A mixture of experts of 26B on an H200, roughly. No graph holds its steps with prompts."""

LENGTH = 2_048
NUM_AT_ONCE = 32


def test_many_prompts_at_once_of_a_model_with_windows_share_steps_when_vram_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time_ = VirtualTime()
    with time_.patched():
        sizes = {"device_size": "16GiB", "host_size": "24GiB"}
        arguments = {"model": "random:gemma-4-26b-a4b", **sizes}
        core = ModelledCore(load_settings(arguments=arguments).settings, MOE, time_)
        steps, execute = list[int](), core._runner.execute
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        numbers = random.Random(0)

        def note(rows: Sequence[BatchRow], late_event: Any = None) -> StepOutput:
            steps.append(sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1))
            return execute(rows, late_event)

        def serve(name: str) -> list[int]:
            """Serve prompts at once; return how many tokens of them each step computed."""
            steps.clear()
            for index in range(NUM_AT_ONCE):
                prompt = numbers.choices(range(100_000), k=LENGTH)
                asked = EngineRequest(
                    request_id=f"{name}-{index}", prompt_token_ids=prompt, params=params
                )
                core.add_request(asked)
            while core.has_work:
                core.step()
                core.wait(0.01)
            return [num_tokens for num_tokens in steps if num_tokens]

        monkeypatch.setattr(core._runner, "execute", note)
        at_first = serve("fills an empty VRAM")
        serve("fills it")
        assert core.parts.tiers.device.num_empty < core.parts.tiers.device.num_blocks // 8
        at_last = serve("evicts")
        assert sum(at_last) == sum(at_first) == NUM_AT_ONCE * LENGTH
        assert len(at_first) < NUM_AT_ONCE / 3
        assert len(at_last) < NUM_AT_ONCE * 4 / 5, "room is made for one prompt at a time"
        core.close()
