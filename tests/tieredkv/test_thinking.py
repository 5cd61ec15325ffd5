"""How much a model is to think reaches the chat templates that take it."""

from typing import Any

import pytest

from tests import golden
from tests.golden import refused, warnings_of
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.anthropic_api import CountTokensRequest, MessagesRequest
from tieredkv.server.asked import ApiRequest, PlainRequest, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.chat_template import ChatTemplate
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.responses_api import InputTokensRequest, ResponsesRequest
from tieredkv.server.tokenize_requests import TokenizeRequest

ASKED: Any = [{"role": "user", "content": "Why?"}]
TOLD = "Effort {{ reasoning_effort }}, {{ enable_thinking }}, {{ thinking }}."
RULES = Rules(Settings(), is_strict=True)
INFO = EngineInfo(model="m", max_model_len=4096, vocab_size=1024, block_size=16, worker_pid=None)
NEEDED: dict[type[ApiRequest], dict[str, Any]] = {
    ChatRequest: {"messages": ASKED},
    ResponsesRequest: {"input": ASKED},
    MessagesRequest: {"messages": ASKED, "max_tokens": 9},
}


def tokenization_of(**arguments: Any) -> Tokenization:
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = TOLD + str(tokenizer.chat_template)
    return Tokenization(tokenizer, template_arguments=arguments)


def prompt_of(kind: type[ApiRequest], tokenization: Tokenization, **fields: Any) -> str:
    body: Any = read(kind, {"model": "m", **NEEDED[kind], **fields}, RULES.refuses)
    return str(tokenization.tokenizer.decode(body.ask(tokenization, RULES).prompts[0]))


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (ChatRequest, {}, "Effort , , ."),
        (ChatRequest, {"reasoning_effort": "medium"}, "Effort medium, True, True."),
        (ChatRequest, {"reasoning_effort": "none"}, "Effort low, False, False."),
        (ResponsesRequest, {}, "Effort , , ."),
        (ResponsesRequest, {"reasoning": {"effort": "xhigh"}}, "Effort high, True, True."),
        (ResponsesRequest, {"reasoning": {"summary": "auto"}}, "Effort , , ."),
        (MessagesRequest, {}, "Effort , , ."),
        (MessagesRequest, {"thinking": {"type": "disabled"}}, "Effort , False, False."),
        (MessagesRequest, {"thinking": {"type": "adaptive"}}, "Effort , True, True."),
        (MessagesRequest, {"output_config": {"effort": "max"}}, "Effort high, , ."),
    ],
)
def test_effort_and_thinking_are_arguments_of_the_template(
    kind: type[ApiRequest], fields: dict[str, Any], told: str
) -> None:
    assert prompt_of(kind, tokenization_of(), **fields).startswith(told)


def test_a_request_comes_before_the_server_and_its_own_arguments_before_its_effort() -> None:
    tokenization = tokenization_of(enable_thinking=False, reasoning_effort="low")
    assert prompt_of(ChatRequest, tokenization).startswith("Effort low, False, .")
    how: Any = {"reasoning_effort": "high"}
    assert prompt_of(ChatRequest, tokenization, **how).startswith("Effort high, True, True.")
    how["chat_template_kwargs"] = {"enable_thinking": False, "thinking": 5}
    assert prompt_of(ChatRequest, tokenization, **how).startswith("Effort high, False, 5.")


# --- Arguments that a client names

FLAGS = "{{ 'keeps' if preserve_thinking is defined and preserve_thinking is true else 'drops' }} "
FLAGS += "{{ effort }}|"
EACH = pytest.mark.parametrize("kind", NEEDED)


def flagged() -> Tokenization:
    """Return a tokenization whose template asks if one argument is true, and prints another."""
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = FLAGS + str(tokenizer.chat_template)
    return Tokenization(tokenizer)


@EACH
def test_arguments_that_the_client_names_reach_the_template_in_each_api(
    kind: type[ApiRequest],
) -> None:
    for given, told in ((True, "keeps A|"), (False, "drops A|"), (None, "drops A|")):
        how = {"preserve_thinking": given, "effort": "A"}
        assert prompt_of(kind, flagged(), chat_template_kwargs=how).startswith(told)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"reasoning_effort": "high"}),
        (ResponsesRequest, {"reasoning": {"effort": "high"}}),
        (MessagesRequest, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
    ],
)
def test_they_come_before_what_the_api_s_own_fields_say(
    kind: type[ApiRequest], fields: dict[str, Any]
) -> None:
    how = {"enable_thinking": False, "reasoning_effort": "low"}
    told = prompt_of(kind, tokenization_of(), chat_template_kwargs=how, **fields)
    assert told.startswith("Effort low, False, ")


@EACH
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("clear_thinking", False, "unsupported_parameter"),
        ("raise_exception", "a", "unsupported_parameter"),
        ("tools", "a", "unsupported_parameter"),
        ("add_generation_prompt", False, "unsupported_parameter"),
        ("preserve_thinking", "false", "invalid_type"),
        ("preserve_thinking", 0, "invalid_type"),
        ("effort", ["high"], "invalid_type"),
    ],
)
def test_an_argument_without_an_effect_is_refused_in_each_api(
    kind: type[ApiRequest], name: str, value: object, code: str
) -> None:
    with refused(RequestError, param=f"chat_template_kwargs.{name}", code=code):
        prompt_of(kind, flagged(), chat_template_kwargs={name: value})


def test_a_template_without_arguments_says_so() -> None:
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenization, name = Tokenization(tokenizer), "enable_thinking"
    with refused(RequestError, param=f"chat_template_kwargs.{name}"):
        prompt_of(ChatRequest, tokenization, chat_template_kwargs={name: False})


def test_the_log_names_arguments_of_the_server_that_the_template_does_not_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = flagged().tokenizer
    arguments = {"preserve_thinking": "yes", "clear_thinking": False, "effort": "A"}
    prompt_of(ChatRequest, Tokenization(tokenizer, template_arguments=arguments))
    for each in warnings_of(caplog, "tieredkv.server.chat"):
        golden.told(each)


@pytest.mark.parametrize(
    ("source", "switches"),
    [
        ("{% if a is defined and a is false %}b{% endif %}", {"a"}),
        ("{% set a = a if a is defined else true %}{% if a %}b{% endif %}", {"a"}),
        ("{% if not a is defined %}{% set a = 1 %}{% endif %}{{ 'b' if a }}", {"a"}),
        ("{{ 'b' if (a is defined and not a) or c else 'd' }}", {"a", "c"}),
        ("{% if a | default(true) %}b{% endif %}{% if a is not none %}c{% endif %}", {"a"}),
        ("{% if a %}{{ a }}{% endif %}", set()),
        ("{{ a or b }}{% set c = d %}", set()),
        ("{% if a == 'high' %}b{% endif %}{% if c is string %}d{% endif %}", set()),
        ("{{ b if a else c }}", {"a"}),
        ("{% macro f() %}{% if a %}b{% endif %}{% endmacro %}{{ f() }}", {"a"}),
    ],
)
def test_what_a_template_only_asks_for_its_truth_is_a_switch(
    source: str, switches: set[str]
) -> None:
    assert ChatTemplate(source).switches == switches


# --- Counting


def test_tokens_are_counted_with_the_same_thinking() -> None:
    tokenization = tokenization_of()
    fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": ASKED}
    counted = read(CountTokensRequest, {"model": "m", **fields}, RULES.refuses)
    prompt = prompt_of(MessagesRequest, tokenization, **fields)
    token_ids = tokenization.tokenizer.encode(prompt, add_special_tokens=False)
    assert counted.tell(tokenization, INFO) == {"input_tokens": len(token_ids)}


@pytest.mark.parametrize("kind", [CountTokensRequest, InputTokensRequest, TokenizeRequest])
def test_tokens_are_counted_with_the_arguments_that_the_client_names(
    kind: type[PlainRequest],
) -> None:
    field = "input" if kind is InputTokensRequest else "messages"

    def count(**arguments: Any) -> int:
        how = {"model": "m", field: ASKED, "chat_template_kwargs": arguments}
        told = read(kind, how, RULES.refuses).tell(flagged(), INFO)
        return int(next(told[name] for name in ("count", "input_tokens") if name in told))

    assert count(effort="A" * 9) == count(effort="A") + 8
    with pytest.raises(RequestError):
        count(nosuch=1)
