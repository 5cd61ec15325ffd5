"""Runs of a bench in a file that is cut, read again, or of something else."""

from pathlib import Path
from typing import Any, cast

import pytest

from tests.golden import refused
from tieredkv.bench import crowd, sessions
from tieredkv.bench.crowd import Answer, Outcome
from tieredkv.bench.kept_runs import KeptRuns, Run
from tieredkv.errors import ConfigError
from tieredkv.types import Tier

FACTS = {"commit": "0e45", "settings": {"device_size": 1 << 30}, "gpu": None}
FIRST, SECOND = Run("load", 4, 0), Run("planned", 4, 0)


def outcome(ttft_ms: float) -> Outcome:
    by_tier = {Tier.DEVICE: 16, Tier.HOST: 0, Tier.DISK: 32}
    answers = [Answer(1, 2, 3.5, ttft_ms, [1.25, 2.0], [7, 8, 9], 50, by_tier, 3, 0.1, "disk")]
    return Outcome(answers, 4.5, {"used_reads": 2}, 0.5, 99, "bypassed", 1.5, "a processor")


def test_runs_are_read_again_as_they_were(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path / "runs", FACTS)
    assert kept.read() == {}
    kept.add(FIRST, outcome(10.0))
    KeptRuns(tmp_path / "runs", FACTS).add(SECOND, outcome(20.0))
    assert kept.read() == {FIRST: outcome(10.0), SECOND: outcome(20.0)}


@pytest.mark.parametrize("num_cut", [1, 40])
def test_a_run_that_was_cut_while_it_was_written_is_made_again(
    tmp_path: Path, num_cut: int
) -> None:
    path = tmp_path / "runs"
    kept = KeptRuns(path, FACTS)
    kept.add(FIRST, outcome(10.0))
    kept.add(SECOND, outcome(20.0))
    path.write_bytes(path.read_bytes()[:-num_cut])
    kept = KeptRuns(path, FACTS)
    assert kept.read() == {FIRST: outcome(10.0)}
    kept.add(SECOND, outcome(30.0))
    assert kept.read() == {FIRST: outcome(10.0), SECOND: outcome(30.0)}


@pytest.mark.parametrize(
    "facts", [FACTS | {"commit": "0e46"}, FACTS | {"gpu": "H"}, FACTS | {"dtype": "float32"}]
)
def test_runs_of_something_else_are_refused(tmp_path: Path, facts: dict[str, object]) -> None:
    KeptRuns(tmp_path / "runs", FACTS).add(FIRST, outcome(10.0))
    with refused(ConfigError):
        KeptRuns(tmp_path / "runs", facts).read()


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"run": ["load", 4, 0]}', "{}"])
def test_another_file_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs").write_text(line + "\n")
    with refused(ConfigError):
        KeptRuns(tmp_path / "runs", FACTS).read()


def test_a_bench_reads_the_file_once_and_again_after_it_made_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0
    read = KeptRuns.read

    def counted(self: KeptRuns) -> Any:
        nonlocal num_read
        num_read += 1
        return read(self)

    def run_arms(_settings: Any, arms: list[str], _measure: Any, kept: KeptRuns, *_: Any) -> None:
        assert (num_read, arms) == (1, ["planned"])
        kept.add(SECOND, outcome(20.0))

    monkeypatch.setattr(KeptRuns, "read", counted)
    monkeypatch.setattr(crowd, "run_arms", run_arms)
    kept, nothing = KeptRuns(tmp_path / "runs", FACTS), cast(Any, None)
    kept.add(FIRST, outcome(10.0))
    plan, shape = crowd.Plan(nothing, nothing, {}, 0), sessions.Shape(1, 1, None)
    expected = {FIRST: outcome(10.0), SECOND: outcome(20.0)}
    assert sessions.make_runs(kept, [FIRST, SECOND], plan, shape, 0) == expected
    assert num_read == 2
    assert sessions.make_runs(kept, [FIRST, SECOND], plan, shape, 0) == expected
    assert num_read == 3
