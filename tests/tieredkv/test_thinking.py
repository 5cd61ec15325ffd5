"""How much a model is to think reaches the chat templates that take it."""

from typing import Any

import pytest

from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.fields import read
from tieredkv.server.anthropic_api import CountTokensRequest, MessagesRequest
from tieredkv.server.asked import ApiRequest, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.responses_api import ResponsesRequest

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


def test_tokens_are_counted_with_the_same_thinking() -> None:
    tokenization = tokenization_of()
    fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": ASKED}
    counted = read(CountTokensRequest, {"model": "m", **fields}, RULES.refuses)
    prompt = prompt_of(MessagesRequest, tokenization, **fields)
    token_ids = tokenization.tokenizer.encode(prompt, add_special_tokens=False)
    assert counted.tell(tokenization, INFO) == {"input_tokens": len(token_ids)}
