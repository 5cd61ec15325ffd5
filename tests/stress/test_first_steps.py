"""The measurement of first steps beside copies computes each step twice, and needs a GPU."""

import pytest
import torch
from click.testing import CliRunner

from tests.golden import told
from tests.stress import first_steps
from tieredkv.engine.llm import LLM


@pytest.mark.gpu
def test_each_step_is_computed_twice_beside_copies() -> None:
    sizes = {"device_size": "16MiB", "host_size": "16MiB", "max_model_len": 4096}
    with LLM("tiny-random", **sizes) as llm:  # type: ignore[arg-type]
        rows = first_steps.measure(llm, 2, 600, 16)
    assert [2 <= row["num_tokens"] <= 600 for row in rows] == [True, True]
    assert all(row[name]["gpu_ms"] > 0 for row in rows for name in ("first", "then"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_copies_to_wait_for() -> None:
    result = CliRunner().invoke(first_steps.main, ["--model", "tiny-random"])
    assert result.exit_code == 2
    told(result.output.splitlines()[-1])
