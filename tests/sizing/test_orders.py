"""Each order evicts what it says; LRU finds what a replay finds, and none more than the best."""

import json
from pathlib import Path

import pytest

from tests.golden import refused
from tests.sizing.traces import line, random_lines, write
from tieredkv.cache.orders import ORDERS
from tieredkv.cache.pool import BlockPool
from tieredkv.cli.main import main
from tieredkv.errors import ConfigError
from tieredkv.sizing.orders import BEST, clairvoyant_tokens, compare, found_tokens
from tieredkv.sizing.replay import Sizes, replay
from tieredkv.traces import Trace, read_trace
from tieredkv.types import ignore_progress


@pytest.fixture(params=range(4))
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Trace:
    """Return small traces of conversations."""
    lines = random_lines(request.param, requests=400)
    return read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)


@pytest.mark.parametrize("num_blocks", [40, 100, 300, 10_000])
def test_lru_finds_what_the_pool_of_a_server_finds(trace: Trace, num_blocks: int) -> None:
    sizes = Sizes(device=512 * num_blocks, token_bytes=1)
    found = replay(trace, sizes, ignore_progress)["cached_tokens"]
    assert found_tokens(trace, BlockPool(num_blocks)) == found


def test_no_order_finds_more_than_the_best_and_with_room_for_all_each_finds_as_much(
    trace: Trace,
) -> None:
    *small, large = compare(trace, [512 * 40, 512 * 100, 512 * 10_000], 1, ignore_progress)
    for row in small:
        assert all(row[name] < row[BEST] for name in ORDERS)
    assert len({large[name] for name in (*ORDERS, BEST)}) == 1


def test_the_best_keeps_what_comes_again_soonest(tmp_path: Path) -> None:
    lines = [line(0, [1]), line(1, [2]), line(2, [3]), line(3, [2]), line(4, [1])]
    trace = read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)
    assert clairvoyant_tokens(trace, 1) == 512
    assert clairvoyant_tokens(trace, 2) == 1024


def test_a_cache_without_room_for_the_longest_request_is_refused(trace: Trace) -> None:
    with refused(ConfigError):
        compare(trace, [5 << 10], 1, ignore_progress)


def test_the_command_prints_a_row_for_each_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "trace.jsonl", random_lines(5))
    asked = ["size", str(path), "--orders", "3GiB,8GiB", "--commit", "none"]
    assert main(asked) == 0
    assert capsys.readouterr().out.split()[:3] == ["size", "lru", "fifo"]
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["bytes"] for row in document["rows"]] == [3 << 30, 8 << 30]
    assert main([*asked, "--plot", str(tmp_path / "orders.png")]) == 2
    assert document["rows"][0].keys() == {"bytes", *ORDERS, BEST}
