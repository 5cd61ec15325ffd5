"""Grammars are compiled first in a process that can be killed, and verdicts are remembered."""

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tieredkv.engine.byte_tokenizer import stop_token_ids
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import RequestError
from tieredkv.server.grammar_checker import GrammarChecker

pytestmark = pytest.mark.e2e  # each starts a process that compiles

INFO = EngineInfo(
    model="m",
    max_model_len=64,
    vocab_size=1024,
    worker_pid=None,
    eos_token_ids=sorted(stop_token_ids()),
)


def grammar(pattern: str) -> str:
    return json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}})


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker("tiny-random", INFO, 30.0)
    yield checker
    checker.close()


def test_a_fault_is_told_again_without_asking(checker: GrammarChecker) -> None:
    checker.check(grammar("a"))
    for _ in range(2):
        with pytest.raises(RequestError, match="The grammar cannot be used: Regex parsing error"):
            checker.check(grammar("("))
        assert checker._process is not None
        checker._process.kill()  # what is known needs no process
    checker.check(grammar("a"))


def test_what_no_answer_can_follow_is_refused(checker: GrammarChecker) -> None:
    endless = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    form = {"type": "json_schema", "json_schema": endless}
    with pytest.raises(RequestError, match="no answer can follow it"):
        checker.check(json.dumps({"type": "structural_tag", "format": form}))


def test_a_grammar_that_takes_too_long_ends_its_process() -> None:
    checker = GrammarChecker("tiny-random", INFO, 0.0)
    for _ in range(2):
        with pytest.raises(RequestError, match="compiling it takes longer than 0s"):
            checker.check(grammar("a"))
        assert checker._process is None


def test_a_grammar_that_ends_its_compiler_is_refused_and_the_next_gets_another(
    checker: GrammarChecker,
) -> None:
    checker.check(grammar("a"))
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    with pytest.raises(RequestError, match="takes too much memory"):
        checker.check(grammar("b"))
    checker.check(grammar("c"))


def test_a_compiler_that_cannot_start_is_no_fault_of_the_grammar() -> None:
    checker = GrammarChecker("/nowhere/at-all", INFO, 30.0)
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot start") as failed:
            checker.check(grammar("a"))
        assert failed.value.status == 503


def test_a_stop_ends_a_check(checker: GrammarChecker) -> None:
    failures = list[RequestError]()

    def check() -> None:
        try:
            checker.check(grammar("a"))
        except RequestError as error:
            failures.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    while checker._process is None:
        time.sleep(0.001)
    checker.close()
    thread.join(30)
    assert not thread.is_alive()
    assert [failure.code for failure in failures] in (["shutting_down"], [])
