"""No order finds more than one that knows the future, and with enough room all find the same."""

from pathlib import Path

import pytest

from tests.sizing.traces import line, random_lines, write
from tests.stress.eviction_bound import clairvoyant_tokens
from tieredkv.sizing.replay import Sizes, replay
from tieredkv.traces import read_trace
from tieredkv.types import ignore_progress


@pytest.mark.parametrize("num_blocks", [5, 20, 60, 10_000])
def test_the_bound_is_never_below_lru(num_blocks: int, tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "trace.jsonl", random_lines(4)), ignore_progress)
    sizes = Sizes(device=512 * num_blocks, token_bytes=1)
    lru = replay(trace, sizes, ignore_progress)["cached_tokens"]
    best = clairvoyant_tokens(trace, num_blocks)
    assert best > lru if num_blocks < 1000 else best == lru


def test_what_comes_again_soonest_is_kept(tmp_path: Path) -> None:
    lines = [line(0, [1]), line(1, [2]), line(2, [3]), line(3, [2]), line(4, [1])]
    trace = read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)
    assert clairvoyant_tokens(trace, 1) == 512
    assert clairvoyant_tokens(trace, 2) == 1024
