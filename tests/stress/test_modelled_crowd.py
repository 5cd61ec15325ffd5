"""Crowds on a modelled machine: what the commands report, and what ideal pools find."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.golden import told
from tests.stress.modelled_crowd import (
    compared,
    inclusive,
    is_worse,
    main,
    one_pool,
    paired,
    tail_pages,
)
from tieredkv.bench.crowd import Answer, Outcome
from tieredkv.types import BlockHash, Tier

ROOT = Path(__file__).parents[2]

Row = dict[str, Any]


def report(*words: object) -> Row:
    """Run a command; return its report."""
    command = [sys.executable, "-m", "tests.stress.modelled_crowd", *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: Row = json.loads(result.stdout)
    return found


def test_ideal_pools_find_what_they_should() -> None:
    a, b = ([BlockHash(bytes([text, index])) for index in range(4)] for text in b"ab")
    chains = [(a, 65), (b, 65), (a, 65), (b, 65)]
    assert one_pool(chains, 8, 16) == 128
    assert one_pool(chains, 7, 16) == 48 + 48
    assert inclusive(chains, 4, 4, 16) == 128
    assert one_pool(chains, 0, 16) == 0


def test_shares_of_pages_of_states_are_those_of_full_tiers() -> None:
    kinds = {BlockHash(bytes([index])): index % 2 for index in range(8)}
    entries = {it: SimpleNamespace(block_hash=it, kind=kind) for it, kind in kinds.items()}
    catalog = SimpleNamespace(get=entries.get, superseded={BlockHash(b"\1")})
    host = SimpleNamespace(num_empty=0, num_blocks=10, hashes=[*kinds])
    disk = SimpleNamespace(is_full=True, records=entries | {b"": SimpleNamespace(kind=1)})
    parts = SimpleNamespace(tiers=SimpleNamespace(host=host, catalog=catalog))
    core: Any = SimpleNamespace(parts=parts, disk=disk)
    assert tail_pages(core) == {"host": 0.4, "host_superseded": 0.1, "disk": 5 / 9}
    disk.is_full = False
    host.num_empty = 1
    assert tail_pages(core) == {}


def test_the_planned_arm_is_compared_with_the_better_other_one() -> None:
    def outcome(wall_s: float, ttft_ms: float) -> Outcome:
        tiers = dict.fromkeys(Tier, 0) | {Tier.HOST: 900}
        seen = [
            Answer(0, turn, 0.0, ttft_ms * (1 + turn / 10), [ttft_ms / 10] * 5, [1], 1000, tiers)
            for turn in range(11)
        ]
        return Outcome(seen, wall_s, {}, 0.0)

    slow, fast = [outcome(20.0, 40.0)] * 3, [outcome(10.0, 80.0)] * 3
    planned = [outcome(8.0, 30.0), outcome(10.0, 44.0), outcome(12.0, 70.0)]
    found = compared({"no_disk": slow, "load": fast, "planned": planned})
    assert found["answers_per_s"]["ratio"] == 1.0
    assert found["ttft_ms.p50"]["ratio"] == pytest.approx(66.0 / 60.0)
    assert set(found) > {"ttft_ms.p90", "ttft_ms.p99", "hit_ttft_ms.p90", "itl_ms.p99"}
    low, high = found["ttft_ms.p50"]["p5_p95"]
    assert 0.75 <= low < found["ttft_ms.p50"]["ratio"] < high <= 1.75
    same = compared({"no_disk": slow, "planned": slow})
    assert {(each["ratio"], *each["p5_p95"]) for each in same.values()} == {(1.0, 1.0, 1.0)}
    assert compared({"no_disk": slow}) == compared({"planned": slow}) == {}


@pytest.mark.slow
def test_sessions_are_run_in_each_arm_and_compared_with_ideal_pools() -> None:
    sizes = "--device-size", "800MiB", "--host-size", "256MiB", "--disk-size", "4GiB"
    shape = "--scale", 10, "--turns", 4, "--seed", "0,1"
    found = report("sessions", "--sessions", 4, "--arms", "no_disk,planned", *shape, *sizes)
    assert found["times"] == "computed, not measured"
    none, planned = found["rows"]
    assert (none["arm"], planned["arm"]) == ("no_disk", "planned")
    for row in found["rows"]:
        rates = row["hit_rates"]
        assert row["sessions"] == 4 and row["answers"] >= 2 * 4
        assert 0 < rates["inclusive"] <= rates["one_pool"] <= rates["unbounded"]
        assert rates["measured"] <= rates["unbounded"]
        assert row["tail_shares"]["host"] == row["tail_shares"]["host_superseded"] == 0
        assert 0 < row["prefill_share"] < row["device_busy_share"] < 1
    assert none["bytes_written"] == 0 < planned["bytes_written"]
    [comparison] = found["planned_over_better"]
    assert comparison["sessions"] == 4
    ratio = planned["answers_per_s"] / none["answers_per_s"]
    assert comparison["answers_per_s"]["ratio"] == pytest.approx(ratio, abs=1e-4)


def test_prefixes_that_ram_keeps_are_refused() -> None:
    words = ["returns", "--sessions", "2", "--prefix-tokens", "1000-2000"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    told(result.output)


def of_seeds(**figures: float) -> list[Row]:
    """Return the figures of three seeds, which grow from one to the next."""
    found = {"answers_per_s": 2.0, "ttft_ms.p50": 300.0, "ttft_ms.p90": 900.0} | figures
    return [
        {"seed": seed, "digest": f"{seed}"} | {name: it * (1 + seed) for name, it in found.items()}
        for seed in range(3)
    ]


def test_two_commits_are_compared_seed_by_seed() -> None:
    old = of_seeds()
    found = paired(old, old)
    assert found["same"] == 3
    assert found["ttft_ms.p50"] == {"ratio": 1.0, "p2_p97": [1.0, 1.0]}
    assert not is_worse(found)
    slower = [row | {"digest": "another"} for row in of_seeds(answers_per_s=1.97)]
    assert paired(old, slower)["same"] == 0
    assert is_worse(paired(old, slower))
    assert not is_worse(paired(old, of_seeds(answers_per_s=1.985)))
    with pytest.raises(ValueError):
        paired(old, slower[1:])


def test_a_later_first_token_is_worse_only_if_other_seeds_would_say_so_too() -> None:
    old, late = of_seeds(), of_seeds(**{"ttft_ms.p90": 945.0})
    assert is_worse(paired(old, late))
    late[0]["ttft_ms.p90"] *= 0.95  # the ratios are now 1, 1.05 and 1.05
    mixed = paired(old, late)
    assert mixed["ttft_ms.p90"]["ratio"] > 1.03 and mixed["ttft_ms.p90"]["p2_p97"][0] <= 1
    assert not is_worse(mixed)


def test_reports_of_other_cases_are_not_compared(tmp_path: Path) -> None:
    for name, arm in (("old", "load"), ("new", "planned")):
        rows = [{"arm": arm, "sessions": 4, "by_seed": of_seeds()}]
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    both = str(tmp_path / "old"), str(tmp_path / "new")
    assert CliRunner().invoke(main, ["compare", *both]).exit_code == 1
    same = CliRunner().invoke(main, ["compare", both[0], both[0]])
    assert same.exit_code == 0
    assert json.loads(same.output)["same"] == 3
