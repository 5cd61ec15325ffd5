"""The time to first token is estimated by the planner's own function, from measured rates."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import refused, told
from tests.sizing.traces import line, write
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.disk_link import READ_LATENCY_S
from tieredkv.cache.plan import LinkState, Planner, outlook
from tieredkv.cache.rate_file import SavedRates, parse_rates
from tieredkv.cli.main import main
from tieredkv.errors import ConfigError
from tieredkv.sizing.estimate import CHUNK_TOKENS, Estimate
from tieredkv.types import Tier

BLOCK_TOKENS, BLOCK_BYTES = 512, 512 * 131_072
RATES: dict[str, Any] = {
    "format": "tieredkv-rates/1",
    "machine": {
        "device": "a GPU",
        "disk": "259:1",
        "model": "an 8B model",
        "fingerprint": "00",
        "block_bytes": 2 << 20,
    },
    "read_bytes_per_s": 3e9,
    "write_bytes_per_s": 2e9,
    "up_bytes_per_s": 50e9,
    "steps": [
        [8192, 8192**2 / 2, 0.22, 0],
        [2048, 2048**2 / 2, 0.052, 0],
        [8192, 8192 * 30_000, 0.38, 0],
        [16, 16 * 1000, 0.006, 0],
    ],
}


def estimate(**changes: object) -> Estimate:
    """Return an estimate by rates like those of a GPU."""
    rates = msgspec.convert(RATES | changes, SavedRates)
    return Estimate(rates, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)


def ttft_ms(*sources: Tier | None, pages: Sequence[Tier | None] = ()) -> float:
    """Return the time of one request that is alone."""
    one = estimate()
    one.add_pages(pages, 0.0)
    one.add(sources, BLOCK_TOKENS * len(sources), 0.0)
    found = one.ttft_ms()
    assert found is not None
    p50: float = found["p50"]
    return p50


def test_a_faster_tier_answers_sooner() -> None:
    cold, disk, host, device = (
        ttft_ms(*64 * [tier], None) for tier in (None, Tier.DISK, Tier.HOST, Tier.DEVICE)
    )
    assert device < host < disk < cold


def test_pages_of_windows_are_loaded_before_the_blocks() -> None:
    sources, block_ms = [*8 * [Tier.HOST], None], 1e3 * BLOCK_BYTES / 50e9
    without = ttft_ms(*sources)
    assert ttft_ms(*sources, pages=[Tier.DEVICE] * 10) == without
    later = ttft_ms(*sources, pages=[Tier.HOST] * 10) - without
    assert later == pytest.approx(10 * block_ms, abs=0.1)
    assert ttft_ms(*sources, pages=[Tier.DISK]) > without
    on_disk = [*64 * [Tier.DISK], None]
    assert ttft_ms(*on_disk, pages=[Tier.DISK] * 10) > ttft_ms(*on_disk)


def test_one_request_takes_what_the_planner_says() -> None:
    rates = msgspec.convert(RATES, SavedRates)
    compute = ComputeRate(CHUNK_TOKENS)
    compute.assume(rates.known_steps)
    assert ttft_ms(*65 * [None]) == pytest.approx(1e3 * compute.seconds(0, 65 * 512), abs=0.01)
    planner = Planner(
        [LinkState(3e9, BLOCK_BYTES, latency_s=READ_LATENCY_S)],
        compute.prompt_times,
        block_size=BLOCK_TOKENS,
        least_tokens=compute.least_tokens,
    )
    planned = outlook(planner, 64 * 512, 65 * 512)
    told = ttft_ms(*64 * [Tier.DISK], None)
    assert told == pytest.approx(1e3 * planned.split.done_s, rel=0.05)


def test_requests_wait_for_those_before_them() -> None:
    one = estimate()
    for _ in range(11):
        one.add(32 * [None], 32 * 512, 0.0)
    found = one.ttft_ms()
    assert found is not None
    assert found["p50"] == pytest.approx(6 * ttft_ms(*32 * [None]), rel=0.01)
    one.add(32 * [None], 32 * 512, 1000.0)  # by then all is done
    assert one.busy_s == pytest.approx(12 * ttft_ms(*32 * [None]) / 1e3, rel=0.01)


def test_times_are_told_by_the_slowest_tier_that_a_request_uses() -> None:
    one = estimate(read_bytes_per_s=1e7)
    one.add([*8 * [Tier.DEVICE], *8 * [Tier.HOST], None], 17 * 512, 0.0)
    one.add(9 * [None], 9 * 512, 1000.0)
    one.add([*64 * [Tier.DISK], None], 65 * 512, 2000.0)  # computed sooner
    found = one.ttft_ms()
    assert found is not None
    assert {name: it["requests"] for name, it in found["by_source"].items()} == {
        "cold": 2,
        "host": 1,
    }
    assert found["by_source"]["host"]["p50"] < found["p50"] < found["by_source"]["cold"]["p90"]


def test_what_would_take_longer_to_load_is_computed() -> None:
    one = estimate(read_bytes_per_s=1e5)
    one.add([*64 * [Tier.DISK], None], 65 * 512, 0.0)
    assert one.computed_sooner_tokens == 64 * 512


@pytest.mark.parametrize("changes", [{"read_bytes_per_s": None}, {"steps": []}])
def test_rates_that_were_never_measured_are_named(changes: dict[str, Any]) -> None:
    with refused(ConfigError):
        estimate(**changes)


def test_the_command_takes_a_folder_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(RATES))
    assert parse_rates(file.read_bytes()).read_bytes_per_s == 3e9
    trace = write(tmp_path / "trace.jsonl", [line(0, [1, 2]), line(10, [1, 2, 3])])
    for rates in tmp_path, file:
        assert main(["replay", str(trace), "--rates", str(rates), "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p90"]
        assert [*found["ttft_ms"]["by_source"]] == ["cold", "device"]
        assert 0 < found["device_load"] < 1
    assert main(["replay", str(trace), "--rates", str(file)]) == 0
    assert "TTFT" in capsys.readouterr().out
    file.write_text("{}")
    assert main(["replay", str(trace), "--rates", str(file)]) == 2
    told(re.sub("(cannot be read:).*", r"\1 CAUSE", capsys.readouterr().err))
