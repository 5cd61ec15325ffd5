"""The measurement of host memory's link says where the tokens came from, and what kept it busy."""

import pytest
import torch
from click.testing import CliRunner

from tests.golden import told
from tests.stress import busy_pcie

SIZES = {"model": "tiny-random", "device_size": "16MiB", "host_size": "32MiB"}


@pytest.mark.parametrize("num_streams", [0, pytest.param(2, marks=pytest.mark.gpu)])
def test_the_prefix_comes_from_host_memory_in_the_arms_that_load(num_streams: int) -> None:
    samples, rates = busy_pcie.measure(dict(SIZES), [256], [num_streams], 1)
    cold, load, planned = busy_pcie.rows_of(samples, rates)
    assert [row["arm"] for row in (cold, load, planned)] == ["cold", "load", "planned"]
    assert (cold["tokens_from_host"], load["tokens_from_host"]) == ([0], [256])
    assert 0 <= planned["tokens_from_host"][0] <= 256
    assert (cold["kv_bytes_equal"], load["kv_bytes_equal"]) == (None, True)
    assert planned["kv_bytes_equal"] is (True if planned["tokens_from_host"][0] else None)
    assert load["tokens_equal_cold"] and planned["tokens_equal_cold"]
    assert (load["others_GBps"] > 0) == bool(num_streams)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_can_keep_its_link_busy() -> None:
    result = CliRunner().invoke(busy_pcie.main, ["--model", "tiny-random", "--streams", "0,1"])
    assert result.exit_code == 2
    told(result.output.splitlines()[-1])
