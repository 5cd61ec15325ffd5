"""A replay finds what is known to be in a trace, and what little room is known to keep."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.golden import told
from tests.sizing.traces import Line, line, random_lines, write
from tieredkv.cli.main import main
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicy
from tieredkv.sizing.replay import Sizes, replay
from tieredkv.traces import Trace, read_trace
from tieredkv.types import Tier, ignore_progress

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces"
BLOCK = 512 * 131_072


def published(name: str) -> Trace:
    """Return one of the published traces, where they are."""
    path = PUBLISHED / f"mooncake_{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the published traces are not at {PUBLISHED}")
    return read_trace(path, ignore_progress)


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "rates"),
    [
        ("conversation", 144_793_823, {60: 10.5, 300: 29.3, 600: 35.0, 86_400: 37.4}),
        ("synthetic", 61_194_628, {60: 32.8, 300: 59.5, 600: 64.6, 86_400: 65.1}),
    ],
)
def test_the_facts_of_the_published_traces_come_out(
    name: str, prompt_tokens: int, rates: dict[int, float]
) -> None:
    trace = published(name)
    for idle_s, rate in rates.items():
        found = replay(trace, Sizes(idle_s=idle_s), ignore_progress)
        assert found["prompt_tokens"] == prompt_tokens
        assert round(100 * found["hit_rate"], 1) == rate
        assert found["contiguous_tokens"] == found["cached_tokens"]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Return a small trace of conversations."""
    return read_trace(write(tmp_path / "small.jsonl", random_lines(1)), ignore_progress)


def expected(trace: Trace, idle_s: float) -> int:
    """Return what unlimited memory finds, counted in the plainest way."""
    last_used, cached = dict[int, float](), 0
    for request in trace.requests:
        now, num_found = request.timestamp / 1e3, 0
        for each in request.hash_ids:
            if now - last_used.get(each, -math.inf) > idle_s:
                break
            num_found += 1
        cached += min(512 * num_found, request.input_length)
        last_used.update(dict.fromkeys(request.hash_ids, now))
    return cached


@pytest.mark.parametrize("idle_s", [1, 3, 60, 500, 86_400])
@pytest.mark.parametrize(
    "sizes",
    [
        {"device": math.inf},
        {"device": 0, "host": math.inf},
        {"device": 0, "host": 0, "disk": math.inf},
        {"device": 5 * BLOCK, "host": 3 * BLOCK, "disk": math.inf},
    ],
)
def test_any_unlimited_tier_finds_all_that_there_is(
    trace: Trace, sizes: dict[str, float], idle_s: float
) -> None:
    found = replay(trace, Sizes(idle_s=idle_s, **sizes), ignore_progress)  # type: ignore[arg-type]
    assert found["cached_tokens"] == expected(trace, idle_s)
    assert sum(found["by_tier"].values()) == found["cached_tokens"]
    assert found["prefilled_tokens"] == found["prompt_tokens"] - found["cached_tokens"]


def small(
    lines: list[Any], tmp_path: Path, *, policies: Sequence[RetentionPolicy] = (), **sizes: float
) -> dict[str, Any]:
    """Replay a few requests; sizes are in blocks."""
    path = write(tmp_path / "few.jsonl", lines)
    told: dict[str, Any] = {name: count * BLOCK for name, count in sizes.items()}
    return replay(
        read_trace(path, ignore_progress), Sizes(policies=policies, **told), ignore_progress
    )


def test_no_room_finds_nothing(tmp_path: Path) -> None:
    found = small([line(0, [1, 2]), line(1, [1, 2])], tmp_path, device=0)
    assert found["cached_tokens"] == 0
    assert found["age_at_eviction_s"]["device"] == {"p1": 0.0, "p50": 0.0}


def test_the_last_block_counts_with_its_own_tokens(tmp_path: Path) -> None:
    found = small([line(0, [1, 2], last=3), line(1, [1, 2], last=3)], tmp_path)
    assert found["by_tier"] == {"device": 515, "host": 0, "disk": 0}


def test_a_recorded_answer_is_found_by_the_next_turn_and_the_last_token_is_computed(
    tmp_path: Path,
) -> None:
    first: Line = {"timestamp": 0, "input_length": 40, "output_length": 9, "block_tokens": 16}
    first |= {"hash_ids": [1, 2], "answer_hash_ids": [3]}
    turn = first | {"input_length": 64, "hash_ids": [1, 2, 3, 4], "answer_hash_ids": []}
    found = small([first, turn, turn], tmp_path)
    assert found["cached_tokens"] == 3 * 16 + 4 * 16 - 1
    assert found["prefilled_tokens"] == 40 + 16 + 1


def test_the_tail_of_a_prompt_leaves_before_its_head(tmp_path: Path) -> None:
    lines = [line(0, [1, 2, 3]), line(1, [4]), line(2, [1, 2, 3])]
    assert small(lines, tmp_path, device=3)["cached_tokens"] == 2 * 512


def test_what_vram_evicts_is_found_in_host_memory_and_then_on_disk(tmp_path: Path) -> None:
    lines = [line(0, [1]), line(1, [2]), line(2, [3]), line(3, [1]), line(4, [3])]
    found = small(lines, tmp_path, device=1, host=1, disk=5)
    assert found["by_tier"] == {"device": 0, "host": 512, "disk": 512}
    assert found["bytes_written"]["disk"] == 2 * BLOCK
    assert found["bytes_moved"] == {
        "host_device": 2 * BLOCK,
        "device_host": 4 * BLOCK,
        "disk_host": BLOCK,
        "host_disk": 2 * BLOCK,
    }


def test_a_block_counts_its_age_from_when_it_was_computed(tmp_path: Path) -> None:
    path = write(tmp_path / "few.jsonl", [line(at, [1]) for at in (0, 40, 80, 120)])
    sizes = Sizes(retention_s=100, idle_s=50)
    found = replay(read_trace(path, ignore_progress), sizes, ignore_progress)
    assert found["cached_tokens"] == 2 * 512  # at 40 and 80 s; at 120 s it is too old
    assert found["expired_blocks"] == 1


MINUTE = RetentionPolicy(name="minute", idle_s=60, absolute_s=60, tiers=frozenset(Tier))
HERE = RetentionPolicy(name="here", idle_s=600, absolute_s=600, tiers=frozenset({Tier.DEVICE}))
POLICIES = (*DEFAULT_POLICIES, MINUTE, HERE)


def named(at_s: float, ids: list[int], retention: str | None) -> Line:
    """Return a request with a retention policy, or without one."""
    return line(at_s, ids) | ({"retention": retention} if retention else {})


@pytest.mark.parametrize(
    ("retention", "by_tier"),
    [
        ("24h", {"device": 0, "host": 0, "disk": 2 * 512}),
        (None, {"device": 0, "host": 0, "disk": 2 * 512}),
        ("in_memory", {"device": 0, "host": 512, "disk": 0}),
        ("here", {"device": 0, "host": 0, "disk": 0}),
    ],
)
def test_a_block_goes_where_the_policy_of_its_request_lets_it(
    retention: str | None, by_tier: dict[str, int], tmp_path: Path
) -> None:
    lines = [named(at, [at], retention) for at in (1, 2, 3)]
    lines += [named(4, [1], retention), named(5, [2 if retention != "in_memory" else 3], retention)]
    found = small(lines, tmp_path, policies=POLICIES, device=1, host=1, disk=5)
    assert found["by_tier"] == by_tier
    assert (found["bytes_written"]["disk"] > 0) == (retention in ("24h", None))


@pytest.mark.parametrize(
    ("first", "second", "lives_s"),
    [
        ("minute", "minute", 60),
        ("in_memory", "in_memory", 610),  # 10 minutes from its last use
        ("minute", "in_memory", 610),
        ("in_memory", "24h", 86_400),
        ("24h", "in_memory", 86_400),
        (None, "minute", 86_400),
    ],
)
def test_a_block_lives_as_long_as_the_longest_policy_that_asked_for_it(
    first: str | None, second: str, lives_s: float, tmp_path: Path
) -> None:
    for later_s, is_found in (lives_s, True), (lives_s + 0.001, False):
        lines = [named(0, [1], first), named(10, [1], second), named(later_s, [1], second)]
        found = small(lines, tmp_path, policies=POLICIES)
        assert found["cached_tokens"] == 512 * (1 + is_found)


def test_a_block_that_a_later_request_lets_onto_the_disk_is_written(tmp_path: Path) -> None:
    lines = [named(0, [1], "in_memory"), named(1, [1], "24h"), named(2, [2], "in_memory")]
    found = small(
        [*lines, named(3, [1], "in_memory")], tmp_path, policies=POLICIES, disk=5, device=1
    )
    assert found["by_tier"] == {"device": 512, "host": 0, "disk": 512}
    assert found["bytes_written"]["disk"] == BLOCK
    assert found["requests_by_retention"] == {"in_memory": 3, "24h": 1}


def test_a_claim_on_the_disk_may_end_before_the_others(tmp_path: Path) -> None:
    lines = [named(0, [1], "minute"), named(1, [1], "in_memory"), named(90, [2], "24h")]
    found = small([*lines, named(91, [1], "24h")], tmp_path, policies=POLICIES, device=1, disk=5)
    assert found["by_tier"] == {"device": 512, "host": 0, "disk": 0}
    kept = small([*lines, named(91, [1], "24h")], tmp_path, policies=POLICIES, device=2, disk=5)
    assert kept["by_tier"] == {"device": 2 * 512, "host": 0, "disk": 0}


def test_the_command_takes_policies_from_a_file_and_options_replace_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [named(at, [1], "nightly") for at in (0, 50, 100)]
    path, config = str(write(tmp_path / "trace.jsonl", lines)), tmp_path / "server.toml"
    config.write_text('[retention.nightly]\nidle = "40s"\nabsolute = "8h"\ntiers = ["device"]\n')

    def cached(*options: str) -> tuple[int, dict[str, int]]:
        assert main(["replay", path, *options, "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found["cached_tokens"], found["requests_by_retention"]

    assert cached("--config", str(config)) == (0, {"nightly": 3})
    assert cached("--retention", "24h") == (2 * 512, {})
    assert cached("--idle", "40s", "--config", str(config)) == (0, {})
    assert main(["replay", path, "--config", str(config)]) == 0
    assert "  nightly           3\n" in capsys.readouterr().out
    assert main(["replay", path]) == 2
    told(capsys.readouterr().err)


def test_an_interrupted_replay_tells_what_it_knows(trace: Trace) -> None:
    calls = 0

    def progress(_stage: str, _done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    found = replay(trace, Sizes(), progress)
    assert found["interrupted"]
    assert 0 < found["requests"] < len(trace.requests)


def test_the_command_prints_the_promised_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "trace.jsonl.gz", random_lines(2))
    sizes = ["--vram", "1GiB", "--host", "500MiB", "--disk", "unlimited", "--retention", "24h"]
    asked = ["replay", str(path), *sizes, "--idle", "10m", "--bytes-per-token", "128KiB", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {
        *("requests", "prompt_tokens", "cached_tokens", "by_tier", "prefilled_tokens"),
        *("bytes_moved", "bytes_written", "wear_bytes_per_day", "requests_per_s"),
    } <= found.keys()
    assert {"p1", "p50"} <= found["age_at_eviction_s"].keys()
    assert found["ttft_ms"] is None
    assert main(["replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told("\n".join(line for line in lines if "--rates" in line))
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    "arguments",
    [["--vram", "many"], ["--retention", "0"], ["--bytes-per-token", "0"], ["--rates", "."]],
)
def test_bad_options_are_refused_with_the_way_out(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("trace.jsonl"), [line(0, [1])])
    assert main(["replay", "trace.jsonl", *arguments]) == 2
    told(capsys.readouterr().err)
