"""Answers that follow a grammar: masks, the end of an answer, and the engine's run ahead."""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import xgrammar

from tests import golden
from tests.golden import refused
from tieredkv.engine import grammars
from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, byte_tokenizer, stop_token_ids
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import EngineRequest, StepOutputs
from tieredkv.engine.engine_process import EngineProcess
from tieredkv.engine.grammars import Compiler, Grammars, Matcher, allowed_tokens
from tieredkv.engine.llm import LLM
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError

CPU = torch.device("cpu")
EOS = stop_token_ids()
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def grammar(kind: str, **fields: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": {"type": kind, **fields}})


# xgrammar compiles it, unlike a plain reference to itself, which some of its versions refuse.
WITHOUT_END = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
DIGITS = grammar("regex", pattern="[0-9]{3}-[0-9]{2}")
YES_OR_NO = grammar("regex", pattern="yes|no")
JSON = grammar("json_schema", json_schema=PERSON, max_whitespace_cnt=1)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_tokenizer(BYTE_VOCAB_SIZE, 4096), BYTE_VOCAB_SIZE, EOS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-random", device_size="16MiB") as llm:
        yield llm


def allowed(matchers: list[Matcher], later: list[Any], device: torch.device = CPU) -> torch.Tensor:
    return allowed_tokens(matchers, later, BYTE_VOCAB_SIZE, device)


def ids_of(row: torch.Tensor) -> set[int]:
    return set(row.nonzero()[:, 0].tolist())


def check_follows_a_grammar(compiler: Compiler, device: torch.device) -> None:
    digits, answer = (Matcher(compiler.compile(each)) for each in (DIGITS, YES_OR_NO))
    rows = allowed([digits, answer], [(), ()], device)
    assert rows.shape == (2, BYTE_VOCAB_SIZE) and rows.device.type == device.type
    assert [ids_of(row) for row in rows] == [{*b"0123456789"}, {*b"yn"}]
    for byte in b"no":
        answer.accept(byte)
    assert ids_of(allowed([answer], [()], device)[0]) == EOS
    answer.accept(min(EOS))
    assert answer.is_done
    answer.accept(ord("x"))  # computed ahead


def test_masks_follow_a_grammar_to_its_end(compiler: Compiler) -> None:
    check_follows_a_grammar(compiler, CPU)


@pytest.mark.gpu
def test_masks_reach_the_gpu(compiler: Compiler) -> None:
    check_follows_a_grammar(compiler, torch.device("cuda", 0))


def test_an_end_token_that_may_not_come_yet_comes_where_nothing_else_may(
    compiler: Compiler,
) -> None:
    matcher = Matcher(compiler.compile(grammar("regex", pattern="ab?")))
    matcher.accept(ord("a"))
    assert ids_of(allowed([matcher], [EOS])[0]) == {ord("b")}
    matcher.accept(ord("b"))
    assert ids_of(allowed([matcher], [EOS])[0]) == EOS


def test_a_special_token_may_come_only_where_the_grammar_names_it(compiler: Compiler) -> None:
    text = Matcher(compiler.compile(grammar("regex", pattern="[^a]*")))
    special = {*range(256, BYTE_VOCAB_SIZE)}
    assert ids_of(allowed([text], [()])[0]) & special == EOS
    named = Matcher(compiler.compile(grammar("const_string", value="<|im_start|>x")))
    [start] = ids_of(allowed([named], [()])[0]) & special
    named.accept(start)
    assert ids_of(allowed([named], [()])[0]) == {ord("x")}


@pytest.mark.parametrize("text", ["{}", "no JSON", grammar("regex", pattern="(")])
def test_what_is_no_grammar_is_refused(compiler: Compiler, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(text)
    golden.told(re.sub("(cannot be used:).*", r"\1 CAUSE", str(caught.value)))


def test_a_grammar_whose_tokens_take_ever_longer_is_refused(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ambiguous = grammar("grammar", grammar='root ::= root root | "a"')
    for step_s, is_refused in ((0.0, False), (0.001, True)):
        fill = filling(itertools.count(0.0, step_s))
        monkeypatch.setattr(grammars, "_fill_s", fill)
        with refused(RequestError) if is_refused else contextlib.nullcontext():
            compiler.check(ambiguous)


def filling(took: Iterator[float]) -> Callable[[Matcher, torch.Tensor, int], float]:
    """Return what fills a mask and tells these times instead of its own."""

    def fill(matcher: Matcher, mask: torch.Tensor, index: int) -> float:
        matcher.within.fill_next_token_bitmask(mask, index)
        return next(took)

    return fill


def test_a_slow_grammar_ends_its_own_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_fill_s", lambda *_: 1.0)
    monkeypatch.setattr(grammars, "SLOW_S", -1.0)  # each token is slow
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for request_id, told in (("slow", JSON), ("free", None)):
        llm.core.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=[1], params=params, grammar=told)
        )
    last = {o.request_id: o for o in outputs_of(llm.core) if o.finish_reason}
    assert last["free"].finish_reason == "length"
    assert grammars.TOO_SLOW in (last["slow"].error or "")


def test_a_token_that_xgrammar_leaves_out_leaves_its_bytes() -> None:
    """Its fault with tokens that contain the one before them, which `Compiler` describes."""
    texts = [b"ba", b"bba", *(bytes([byte]) for byte in range(256)), b""]
    info = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[len(texts) - 1])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("bba")
    assert xgrammar.GrammarMatcher(compiled).accept_token(texts.index(b"bba"))
    matcher, text = Matcher(compiled), b""
    while not matcher.is_done:
        mask = allowed_tokens([matcher], [()], len(texts), CPU)[0]
        bytes_only = [it for it in ids_of(mask) if len(texts[it]) < 2]
        matcher.accept(bytes_only[0])
        text += texts[bytes_only[0]]
    assert text == b"bba" and not matcher.fault


def test_a_model_without_end_tokens_cannot_be_constrained() -> None:
    compiler = Compiler(byte_tokenizer(BYTE_VOCAB_SIZE, 4096), BYTE_VOCAB_SIZE, ())
    with refused(RequestError, code="unsupported_parameter"):
        compiler.compile(DIGITS)


ENDLESS = grammar(
    "sequence",
    elements=[
        {"type": "const_string", "value": "ab"},
        {"type": "json_schema", "json_schema": WITHOUT_END},
    ],
)


def test_an_answer_that_cannot_go_on_fails_and_no_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for request_id, told in (("bad", ENDLESS), ("good", DIGITS), ("free", None)):
        llm.core.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=[1], params=params, grammar=told)
        )
    outputs = outputs_of(llm.core)
    [why] = [output.error for output in outputs if output.finish_reason == "error"]
    golden.told(str(why))
    told_tokens = {name: 0 for name in ("bad", "good", "free")}
    for output in outputs:
        told_tokens[output.request_id] += len(output.token_ids)
    assert told_tokens == {"bad": 2, "good": 7, "free": 9}
    llm.core.scheduler.check()


def test_no_answer_can_follow_a_grammar_without_a_first_token(compiler: Compiler) -> None:
    compiler.check(DIGITS)
    with refused(RequestError):
        compiler.check(grammar("json_schema", json_schema=WITHOUT_END))


def serve(llm: LLM, grammars: list[str | None], **params: Any) -> list[Any]:
    """Answer one request for each grammar, all of them together."""
    params = {"max_tokens": 400, **params}
    requests = [
        llm.make_request(f"{i} " * 40, SamplingParams(seed=i, **params), grammar=each)
        for i, each in enumerate(grammars)
    ]
    return llm.serve(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_answer_of_a_batch_follows_its_own_grammar(llm: LLM, temperature: float) -> None:
    told = [JSON, DIGITS, None, YES_OR_NO, JSON]
    one, digits, free, word, two = serve(llm, told, temperature=temperature)
    for answer in (one, two):
        if answer.finish_reason == "stop":  # the name may be longer than the answer
            person = json.loads(answer.text)
            assert person.keys() == PERSON["properties"].keys() and type(person["age"]) is int
        else:
            assert answer.text.lstrip().startswith("{")
    assert digits.text[3] == "-" and digits.text.replace("-", "").isdigit()
    assert word.text in ("yes", "no") and word.finish_reason == "stop"
    assert len(free.token_ids) > 1


def test_a_row_without_a_grammar_is_not_changed_by_those_beside_it(llm: LLM) -> None:
    plain = serve(llm, [None, None], max_tokens=12)
    mixed = serve(llm, [None, None, DIGITS, JSON], max_tokens=12)
    assert [a.token_ids for a in mixed[:2]] == [a.token_ids for a in plain]


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 300},
        {"ignore_eos": True},
        {"logit_bias": {ord("y"): -100.0, ord("n"): -100.0}},
        {"repetition_penalty": 2.0, "temperature": 0.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 0.9},
    ],
)
def test_no_parameter_leads_out_of_the_grammar(llm: LLM, params: dict[str, Any]) -> None:
    [answer] = serve(llm, [YES_OR_NO], **params)
    assert answer.text in ("yes", "no") and answer.finish_reason == "stop"


def test_a_stop_string_and_the_length_cut_an_answer(llm: LLM) -> None:
    [stopped] = serve(llm, [DIGITS], stop="-")
    assert len(stopped.text) == 3 and stopped.finish_reason == "stop"
    [cut] = serve(llm, [DIGITS], max_tokens=2)
    assert len(cut.text) == 2 and cut.finish_reason == "length"


def test_log_probabilities_are_those_of_the_model(llm: LLM) -> None:
    [answer] = serve(llm, [YES_OR_NO], logprobs=1)
    first = answer.logprobs[0]
    assert first.token_id in b"yn" and first.logprob < 0
    assert first.top[0][1] >= first.logprob


def test_preempted_answers_go_on_where_they_were() -> None:
    told = [JSON if i % 2 else None for i in range(6)]
    answers = {}
    for size in ("16MiB", "1MiB"):
        with LLM("tiny-random", device_size=size, max_model_len=256) as llm:
            answers[size] = serve(llm, told, max_tokens=120)
            num_preemptions = llm.core.scheduler.num_preemptions
    assert num_preemptions > 0
    few, many = answers["1MiB"], answers["16MiB"]
    assert [a.token_ids for a in few] == [a.token_ids for a in many]


def outputs_of(core: EngineCore) -> list[Any]:
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.wait(0.05)
    return outputs


def test_a_request_whose_grammar_is_refused_fails_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    for request_id, told in (("good", DIGITS), ("bad", "{}")):
        llm.core.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=[1], params=params, grammar=told)
        )
    last = {o.request_id: o for o in outputs_of(llm.core) if o.finish_reason}
    assert last["good"].finish_reason == "length"
    assert last["bad"].finish_reason == "error"
    golden.told(re.sub("(cannot be used:).*", r"\1 CAUSE", last["bad"].error))


def test_a_request_is_cancelled_while_its_grammar_is_compiled(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    told = EngineRequest(request_id="a", prompt_token_ids=[1], params=params, grammar=JSON)
    llm.core.add_request(told)
    llm.core.abort("a")
    [output] = outputs_of(llm.core)
    assert output.finish_reason == "abort" and not llm.core.has_work
    llm.core.scheduler.check()


def test_requests_whose_grammars_are_being_compiled_wait_too() -> None:
    sent: list[StepOutputs] = []
    process = EngineProcess(cast(Any, SimpleNamespace(send=sent.append)))
    with LLM("tiny-random", device_size="16MiB", max_num_queued_reqs=2) as llm:
        params = SamplingParams(max_tokens=4)
        for index in range(4):
            process._take(
                llm.core,
                EngineRequest(
                    request_id=f"{index}", prompt_token_ids=[1], params=params, grammar=JSON
                ),
            )
        refused_ids = [output.request_id for it in sent for output in it.outputs]
        assert refused_ids == ["2", "3"]
        assert len(outputs_of(llm.core)) >= 2


def test_a_grammar_that_was_compiled_does_not_wait_for_one_that_is_being_compiled(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, woken = threading.Event(), threading.Semaphore(0)

    class Slow:
        def compile(self, grammar: str) -> Any:
            assert grammar != JSON or go.wait(60)
            return compiler.compile(grammar)

    made = Grammars(lambda: Slow(), woken.release)  # type: ignore[arg-type, return-value]
    first = made.compile(DIGITS).result(60)
    slow, new = made.compile(JSON), made.compile(YES_OR_NO)
    known = made.compile(DIGITS)
    assert known.done() and known.result() is first
    assert not slow.done() and not new.done()
    assert woken.acquire(timeout=60) and woken.acquire(timeout=60), "the engine hears of both"
    go.set()
    assert new.result(60) and slow.result(60)
    monkeypatch.setattr(grammars, "KNOWN_BYTES", 0)
    made.compile(grammar("regex", pattern="a")).result(60)
    go.clear()
    slow, again = made.compile(JSON), made.compile(DIGITS)
    assert not again.done(), "it is no longer known"
    go.set()
    assert slow.result(60) and again.result(60)
    made.close()
