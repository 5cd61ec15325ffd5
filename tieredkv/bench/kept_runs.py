"""Runs of a bench in a file, one line each, written as each run ends.

A bench of hours can be cut, or be split over several calls or days. Runs that the file has are not
made again, and all runs of the file are pooled. To be pooled they must be of the same commit, GPU,
model and settings, so that the file refuses others.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from tieredkv.bench.crowd import Answer, Outcome
from tieredkv.errors import ConfigError
from tieredkv.types import Tier

DIGITS = 3
"""Decimals to which times between tokens are kept, in milliseconds."""

Row = dict[str, Any]


class Run(NamedTuple):
    """Which run it is: of an arm, with a number of sessions, with a seed."""

    arm: str
    sessions: int
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} with {self.sessions} sessions, seed {self.seed}"


class KeptRuns:
    """The runs in a file.

    Args:
        path: of the file, which is made with the first run.
        facts: what all its runs have in common.
    """

    def __init__(self, path: Path, facts: Row) -> None:
        self.path, self.facts = path, json.loads(json.dumps(facts))

    def read(self) -> dict[Run, Outcome]:
        """Return the runs; a last line that was cut is none.

        Raises:
            ConfigError: it is not such a file, or its runs have other facts.
        """
        text = self.path.read_text() if self.path.exists() else ""
        runs = dict[Run, Outcome]()
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break
            try:
                row = json.loads(line)
                run, outcome, facts = Run(*row["run"]), _outcome(row["outcome"]), row["facts"]
            except (ValueError, LookupError, TypeError) as error:
                what = f"`{self.path}`, line {number} is not a run of a bench: {error!r}"
                raise ConfigError(f"{what}\nhint: give another file to `--runs`") from error
            for name in facts | self.facts:
                there, here = facts.get(name), self.facts.get(name)
                if there != here:
                    what = f"`{self.path}`: {run} was run with {name} = {there}, and not {here}"
                    raise ConfigError(f"{what}\nhint: give another file to `--runs`")
            runs[run] = outcome
        return runs

    def add(self, run: Run, outcome: Outcome) -> None:
        """Append a run to the file, in place of a last line that was cut."""
        answers = [
            answer._asdict() | {"gaps_ms": [round(gap, DIGITS) for gap in answer.gaps_ms]}
            for answer in outcome.answers
        ]
        row = {"run": run, "facts": self.facts, "outcome": outcome._asdict() | {"answers": answers}}
        with self.path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _outcome(row: Row) -> Outcome:
    answers = list[Answer]()
    for each in row["answers"]:
        by_tier = {Tier(tier): int(count) for tier, count in each["by_tier"].items()}
        answers.append(Answer(**each | {"by_tier": by_tier}))
    return Outcome(**row | {"answers": answers})
