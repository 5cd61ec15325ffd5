"""An answer continues the text at the end of a conversation, where the client wants that."""

import asyncio
from typing import Any

import anthropic
import openai
import pytest

from tests.golden import refused
from tests.tieredkv.test_chat import LENGTHS, LLAMA_3
from tests.tieredkv.test_tool_calls import ASKED, TOOLS, Engine, anthropic_of, openai_of
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.anthropic_api import CountTokensRequest, MessagesRequest
from tieredkv.server.asked import Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.tokenize_requests import TokenizeRequest

INFO = EngineInfo(model="m", max_model_len=4096, vocab_size=1024, block_size=16, worker_pid=None)
LENIENT, STRICT = (Rules(Settings(), is_strict=each) for each in (False, True))
TEXTS = ["It is", "It is \n ", "  It", "<|im_end|>", "</think", "naïve 🎉"]
CONTINUES: Any = {"continue_final_message": True, "add_generation_prompt": False}


def begun(text: Any) -> Any:
    return [*ASKED, {"role": "assistant", "content": text}]


def ids_of(tokenization: Tokenization, kind: Any, text: Any, **fields: Any) -> list[int]:
    """Return the prompt of a request whose last message is this text of the assistant."""
    request = read(kind, {"model": "m", "messages": begun(text), **fields})
    request.check(LENIENT)
    if kind is TokenizeRequest:
        return [*request.tell(tokenization, INFO)["tokens"]]
    return [*request.ask(tokenization, LENIENT).prompts[0]]


@pytest.mark.parametrize("template", [None, LLAMA_3])
@pytest.mark.parametrize("text", TEXTS)
def test_the_prompt_ends_with_the_text_as_it_was_written(text: str, template: str | None) -> None:
    tokenization = Tokenization(load_tokenizer("tiny-random"))
    tokenization.tokenizer.chat_template = template or tokenization.tokenizer.chat_template
    ids = ids_of(tokenization, MessagesRequest, text, max_tokens=4)
    prompt = str(tokenization.tokenizer.decode(ids))
    head = "<|im_start|>assistant\n" if template is None else "<|im_start|>assistant\n\n"
    assert prompt.endswith(head + (text.lstrip() if template else text))
    assert prompt.count("What is the weather?") == 1
    for kind in (ChatRequest, TokenizeRequest):
        assert ids_of(tokenization, kind, text, **CONTINUES) == ids
        assert ids_of(tokenization, kind, text, continue_final_message=True) == ids
    counted = read(CountTokensRequest, {"model": "m", "messages": begun(text)})
    assert counted.tell(tokenization, INFO) == {"input_tokens": len(ids)}


def test_without_the_wish_an_answer_begins_a_new_message() -> None:
    tokenization = Tokenization(load_tokenizer("tiny-random"))
    prompt = str(tokenization.tokenizer.decode(ids_of(tokenization, ChatRequest, "It is")))
    assert prompt.endswith("It is<|im_end|>\n<|im_start|>assistant\n")


def test_a_breakpoint_on_the_text_is_at_its_end() -> None:
    tokenization = Tokenization(load_tokenizer("tiny-random"))
    texts: list[Any] = [{"type": "text", "text": text} for text in ("It", "is")]
    texts[1]["cache_control"] = {"type": "ephemeral"}
    body = {"model": "m", "max_tokens": 4, "messages": begun(texts)}
    asked = read(MessagesRequest, body).ask(tokenization, LENIENT)
    [claim] = asked.plan.claims
    assert claim.end_token == len(asked.prompts[0])


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_api_gives_what_follows_the_text(is_stream: bool) -> None:
    written = ' 12 °C.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tools: Any = [{"name": "now", "input_schema": {"type": "object"}}]

    async def run() -> None:
        engine = Engine(written)
        how: Any = {"model": "m", "max_tokens": 500, "messages": begun("It is"), "tools": tools}
        messages = anthropic_of(engine).messages
        if is_stream:
            async with messages.stream(**how) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await messages.create(**how)
        text, call = message.content
        assert (text.text, call.name, message.stop_reason) == (" 12 °C.", "now", "tool_use")
        chat = openai_of(engine).chat.completions
        how = {"model": "m", "messages": begun("It is"), "tools": TOOLS, "extra_body": CONTINUES}
        if is_stream:
            chunks = await chat.create(stream=True, **how)
            parts = [it.choices[0].delta.content or "" async for it in chunks]
            content = "".join(parts)
        else:
            content = (await chat.create(**how)).choices[0].message.content
        assert content == " 12 °C."
        assert all(prompt.endswith("<|im_start|>assistant\nIt is") for prompt in engine.prompts)

    asyncio.run(run())


def test_thoughts_that_were_cut_short_go_on() -> None:
    async def run() -> None:
        chat = openai_of(Engine(" so cold.\n</think>\n\nIt is 12 °C.")).chat.completions
        asked = chat.create(model="m", messages=begun("<think>\nNot"), extra_body=CONTINUES)
        message = (await asked).choices[0].message
        assert message.model_extra and message.model_extra["reasoning_content"] == " so cold."
        assert message.content == "It is 12 °C."

    asyncio.run(run())


def test_what_cannot_be_continued_is_refused_in_the_words_of_each_api() -> None:
    used = {"type": "tool_use", "id": "1", "name": "now", "input": {}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    called: Any = [*ASKED, {"role": "assistant", "content": "Hm", "tool_calls": [call]}]

    async def run() -> None:
        messages = anthropic_of(Engine("a")).messages
        for content in ([{"type": "text", "text": "Hm"}, used], [used], " "):
            with refused(anthropic.BadRequestError):
                await messages.create(model="m", max_tokens=4, messages=begun(content))
        chat = openai_of(Engine("a")).chat.completions
        for turns in (ASKED, called, begun("")):
            with refused(
                openai.BadRequestError, param="continue_final_message", code="invalid_value"
            ) as error:
                await chat.create(model="m", messages=turns, extra_body=CONTINUES)
            assert error.value.param == "continue_final_message"
        both = {**CONTINUES, "add_generation_prompt": True}
        with refused(openai.BadRequestError, param="continue_final_message", code="invalid_value"):
            await chat.create(model="m", messages=begun("It"), extra_body=both)

    asyncio.run(run())


def test_white_space_at_the_end_is_refused_by_a_strict_server_as_anthropic_does() -> None:
    body = {"model": "m", "max_tokens": 4, "messages": begun("It is ")}
    read(MessagesRequest, body).check(LENIENT)
    with refused(RequestError):
        read(MessagesRequest, body).check(STRICT)


def test_a_template_that_hides_the_end_of_the_text_is_named() -> None:
    tokenization = Tokenization(load_tokenizer("tiny-random"))
    tokenization.tokenizer.chat_template = LENGTHS
    with refused(RequestError, param="messages"):
        ids_of(tokenization, ChatRequest, "It is", **CONTINUES)
