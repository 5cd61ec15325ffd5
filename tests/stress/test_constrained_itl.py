"""The measurement of constrained answers counts each gap, and each answer follows its grammar."""

import json

from click.testing import CliRunner

from tests.golden import refused
from tests.stress import constrained_itl
from tieredkv.engine.llm import LLM


def test_each_arm_has_its_gaps() -> None:
    options = ["--model", "tiny-random", "--batches", "1,2", "--tokens", "12", "--repeats", "1"]
    result = CliRunner().invoke(constrained_itl.main, [*options, "--device-size", "16MiB"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    counts = {(row["batch"], row["arm"]): row["num_gaps"] for row in report["rows"]}
    left = 12 - constrained_itl.NUM_SKIPPED - 1
    assert counts == {(n, arm): n * left for n in (1, 2) for arm in constrained_itl.ARMS}
    assert report["compile_ms"].keys() == {"1", "10", "100", "300"}


def test_an_answer_that_ends_early_is_no_sample() -> None:
    with LLM("tiny-random", device_size="16MiB") as llm:
        short = constrained_itl.grammar_of({"const": 1})
        with refused(AssertionError):
            constrained_itl.gaps_ms(llm, [short], 12, 0)
