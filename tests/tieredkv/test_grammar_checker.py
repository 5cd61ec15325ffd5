"""Grammars are compiled first in a process that can be killed, and verdicts are remembered."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.golden import refused
from tieredkv.engine.byte_tokenizer import stop_token_ids
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import RequestError
from tieredkv.server import grammar_checker
from tieredkv.server.grammar_checker import GrammarChecker, GrammarQueue

pytestmark = pytest.mark.e2e  # each starts a process that compiles

INFO = EngineInfo(
    model="m",
    max_model_len=64,
    vocab_size=1024,
    block_size=16,
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
        with pytest.raises(RequestError) as caught:
            checker.check(grammar("("))
        assert caught.value.code == "invalid_grammar"
        assert checker._process is not None
        checker._process.kill()  # what is known needs no process
    checker.check(grammar("a"))


def test_what_no_answer_can_follow_is_refused(checker: GrammarChecker) -> None:
    endless = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    form = {"type": "json_schema", "json_schema": endless}
    with refused(RequestError, code="invalid_grammar"):
        checker.check(json.dumps({"type": "structural_tag", "format": form}))


def test_a_grammar_that_takes_too_long_ends_its_process() -> None:
    checker = GrammarChecker("tiny-random", INFO, 0.0)
    for _ in range(2):
        with refused(RequestError, code="invalid_grammar"):
            checker.check(grammar("a"))
        assert checker._process is None


def test_a_grammar_that_ends_its_compiler_is_refused_and_the_next_gets_another(
    checker: GrammarChecker,
) -> None:
    checker.check(grammar("a"))
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    with refused(RequestError, code="invalid_grammar"):
        checker.check(grammar("b"))
    checker.check(grammar("c"))


def test_a_compiler_that_cannot_start_is_no_fault_of_the_grammar() -> None:
    checker = GrammarChecker("/nowhere/at-all", INFO, 30.0)
    for _ in range(2):
        with refused(RequestError, status=503):
            checker.check(grammar("a"))


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


class Slow(GrammarChecker):
    """Compiles at once, but for grammars with `slow` in them, which take until `go` is set."""

    def __init__(self) -> None:
        super().__init__("m", INFO, 30.0)
        self.go, self.compiled = threading.Event(), list[str]()

    def _compile(self, grammar: str) -> str:
        if "slow" in grammar:
            assert self.go.wait(60)
        self.compiled.append(grammar)
        return "bad grammar" if "bad" in grammar else ""


@pytest.fixture
def slow() -> Iterator[Slow]:
    checker = Slow()
    yield checker
    checker.go.set()


def test_what_is_known_does_not_wait_for_a_grammar_that_is_being_compiled(slow: Slow) -> None:
    slow.check("good")
    with pytest.raises(RequestError):
        slow.check("bad")
    thread = threading.Thread(target=slow.check, args=("slow",))
    thread.start()
    assert slow.recall("good")
    slow.check("good")
    for ask in (slow.recall, slow.check):
        with refused(RequestError, code="invalid_grammar"):
            ask("bad")
    assert not slow.recall("slow") and not slow.recall("never seen")
    slow.go.set()
    thread.join(60)
    assert slow.compiled == ["good", "bad", "slow"]
    assert slow.recall("slow")


def test_a_grammar_that_several_wait_for_is_compiled_once(slow: Slow) -> None:
    threads = [threading.Thread(target=slow.check, args=("slow",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    slow.go.set()
    for thread in threads:
        thread.join(60)
    assert slow.compiled == ["slow"]


def test_new_grammars_are_compiled_in_turns_and_a_long_wait_is_told(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_checker, "TOLD_AFTER_S", 0.01)
    caplog.set_level("INFO")

    async def run() -> None:
        queue = GrammarQueue(slow)
        slow.check("known")
        names = ["slow 1", "slow 2", "slow 3"]
        waiting = [asyncio.create_task(queue.check("a", name, f"req {name}")) for name in names]
        waiting.append(asyncio.create_task(queue.check("b", "other", "req other")))
        await asyncio.sleep(0.1)
        for _ in range(50):
            await queue.check("c", "known", "req known")
        assert not any(task.done() for task in waiting)
        slow.go.set()
        await asyncio.gather(*waiting)
        queue.close()

    asyncio.run(run())
    assert slow.compiled == ["known", "slow 1", "slow 2", "other", "slow 3"], "in turns"
    told = [record.args for record in caplog.records if record.name == grammar_checker.__name__]
    assert sorted(map(str, told)) == sorted(
        str((f"req {name}",)) for name in ("slow 1", "slow 2", "slow 3", "other")
    )


def test_a_check_that_nobody_waits_for_leaves_no_word_in_the_log(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asyncio.run(GrammarQueue(slow).check("a", "quick", "req"))
    assert not caplog.records


def test_a_check_that_waits_when_the_checker_is_closed_starts_no_process() -> None:
    checker = GrammarChecker("tiny-random", INFO, 30.0)
    checker.close()
    with pytest.raises(RequestError) as caught:
        checker.check(grammar("a"))
    assert (caught.value.code, caught.value.status) == ("shutting_down", 503)
