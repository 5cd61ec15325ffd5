"""Calls of tools and thoughts reach the clients of each API, whole and in streams."""

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

import anthropic
import openai
import pytest
from transformers import PreTrainedTokenizerBase

from tests.golden import refused, told
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, RequestUsage, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.app import Api, build_app
from tieredkv.server.asked import AUDIO_NOTE, DOCUMENT_NOTE, IMAGE_NOTE, Rules
from tieredkv.server.chat import Encoded, Tokenization
from tieredkv.server.keys import Keys
from tieredkv.server.message_parser import Family, MessageParser, families
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.reply import Reply
from tieredkv.server.responses_api import ResponsesRequest

TOKENIZER = load_tokenizer("tiny-random")
WRITTEN = (
    "<think>\nHmm.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("get_weather", {"city": "Zürich"}), ("now", {})]
ASKED: Any = [{"role": "user", "content": "What is the weather?"}]


class Engine:
    """Stands in for the engine: it writes a text, a token at a time.

    Attributes:
        tokenizer: of the model.
        family: the name of the model's family.
        submitted: the requests that it was given.
    """

    info = EngineInfo(
        model="m",
        max_model_len=4096,
        vocab_size=1024,
        block_size=16,
        worker_pid=None,
        eos_token_ids=[257],
    )
    is_alive, pid, stats = True, 1, dict[str, Any]()
    trouble: str | None = None

    def __init__(
        self,
        text: str,
        finish_reason: str = "stop",
        tokenizer: PreTrainedTokenizerBase = TOKENIZER,
        family: str = "hermes",
    ) -> None:
        self._text, self._reason = text, finish_reason
        self.tokenizer, self.family = tokenizer, family
        self.submitted: list[EngineRequest] = []

    @property
    def prompts(self) -> list[str]:
        """The texts of the prompts that it was given."""
        return [str(self.tokenizer.decode(it.prompt_token_ids)) for it in self.submitted]

    def submit(self, request: EngineRequest, take: Callable[[TokenOutput], None]) -> None:
        self.submitted.append(request)
        token_ids = self.tokenizer.encode(self._text, add_special_tokens=False)
        usage = RequestUsage(prompt_tokens=len(request.prompt_token_ids))

        async def write() -> None:
            for i, token_id in enumerate(token_ids):
                is_last = i == len(token_ids) - 1
                take(
                    TokenOutput(
                        request_id=request.request_id,
                        token_ids=[token_id],
                        finish_reason=self._reason if is_last else None,
                        usage=usage,
                    )
                )
                await asyncio.sleep(0)

        self.writing = asyncio.get_running_loop().create_task(write())

    def abort(self, request_id: str) -> None:
        """Do nothing; what is written is no longer read."""


def api_of(engine: Engine, settings: Settings, keys: Keys | None = None) -> Api:
    """Return a server's routes over a stand-in for the engine."""
    keys = keys or Keys(settings=settings, is_strict=False, is_local=True)
    tokenization = Tokenization(engine.tokenizer, family=families()[engine.family])
    api = Api(settings, cast(Any, engine), tokenization, keys)
    _made.append(api)
    return api


_made: list[Api] = []


@pytest.fixture(autouse=True)
def close_apis() -> Iterator[None]:
    """End what the servers of a test have started."""
    yield
    while _made:
        _made.pop().close()


def client_of(served: Engine | Api, kind: Any) -> Any:
    """Return a client of one of the kinds that programs use, which is served in this process."""
    api = served if isinstance(served, Api) else api_of(served, Settings(model="tiny-random"))
    # Some versions of the programs use another package, whose parts have the same names.
    package = importlib.import_module(kind.__mro__[1].__module__.partition(".")[0])
    return kind(transport=package.ASGITransport(build_app(api)), base_url="http://localhost")


def openai_of(served: Engine | Api, key: str = "x") -> openai.AsyncOpenAI:
    client = client_of(served, openai.DefaultAsyncHttpxClient)
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=client)


def anthropic_of(engine: Engine) -> anthropic.AsyncAnthropic:
    client = client_of(engine, anthropic.DefaultAsyncHttpxClient)
    return anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=client)


def called(calls: Sequence[Any] | None) -> list[tuple[str, Any]]:
    return [(it.function.name, json.loads(it.function.arguments)) for it in calls or ()]


def test_a_chat_completion_has_the_calls_and_takes_their_results() -> None:
    async def run() -> None:
        engine = Engine(WRITTEN)
        chat = openai_of(engine).chat.completions
        [choice] = (await chat.create(model="m", messages=ASKED, tools=TOOLS)).choices
        message = choice.message
        assert (choice.finish_reason, message.content) == ("tool_calls", "Let me see.")
        assert called(message.tool_calls) == CALLS
        assert message.model_extra and message.model_extra["reasoning_content"] == "Hmm."
        ids = [call.id for call in message.tool_calls or ()]
        assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
        results: Any = [{"role": "tool", "tool_call_id": id, "content": "12"} for id in ids]
        turns = [*ASKED, message.model_dump(exclude_none=True), *results]
        await chat.create(model="m", messages=turns, tools=TOOLS)
        first, second = engine.prompts
        assert second.startswith(first + "Let me see.") and '"city": "Zürich"' in second

    asyncio.run(run())


def test_a_chat_stream_has_the_calls() -> None:
    async def run() -> None:
        chat = openai_of(Engine(WRITTEN)).chat.completions
        async with chat.stream(model="m", messages=ASKED, tools=TOOLS) as stream:
            deltas = [
                event.chunk.choices[0].delta async for event in stream if event.type == "chunk"
            ]
            [choice] = (await stream.get_final_completion()).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert called(choice.message.tool_calls) == CALLS
        thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        assert "".join(thoughts) == "Hmm."
        assert [call.index for delta in deltas for call in delta.tool_calls or ()] == [0, 1]

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_has_the_calls_as_items_and_takes_their_results(is_stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    tools.append({"type": "function", "name": "now"})

    async def run() -> None:
        engine = Engine(WRITTEN)
        responses = openai_of(engine).responses
        if is_stream:
            async with responses.stream(model="m", input="Weather?", tools=tools) as stream:
                names = [event.type async for event in stream]
                response: Any = await stream.get_final_response()
            assert names.count("response.output_item.added") == 4
            assert names.count("response.output_item.done") == 4
            assert names.count("response.function_call_arguments.done") == 2
            assert names.count("response.reasoning_text.done") == 1
            assert names[-1] == "response.completed"
        else:
            response = await responses.create(model="m", input="Weather?", tools=tools)
        thoughts, message, *calls = response.output
        assert [it.type for it in response.output[:2]] == ["reasoning", "message"]
        assert thoughts.content[0].text == "Hmm."
        assert (message.content[0].text, response.output_text) == ("Let me see.",) * 2
        assert [(it.name, json.loads(it.arguments)) for it in calls] == CALLS
        items: Any = [{"role": "user", "content": "Weather?"}]
        items += [it.model_dump(exclude_none=True) for it in response.output]
        for call in calls:
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
            items.append(result)
        await responses.create(model="m", input=items, tools=tools)
        first, second = engine.prompts
        assert second.startswith(first + "Let me see.") and '"city": "Zürich"' in second

    asyncio.run(run())


def test_usage_has_the_tokens_of_thoughts() -> None:
    written = WRITTEN.replace("Hmm.", "Hmm. Hm.")
    num_tokens = len(TOKENIZER.encode("Hmm. Hm.", add_special_tokens=False))

    async def run() -> None:
        openai = openai_of(Engine(written))
        chat = await openai.chat.completions.create(model="m", messages=ASKED, tools=TOOLS, n=2)
        assert chat.usage and chat.usage.completion_tokens_details
        assert chat.usage.completion_tokens_details.reasoning_tokens == 2 * num_tokens
        response = await openai.responses.create(model="m", input="Weather?")
        assert response.usage
        assert response.usage.output_tokens_details.reasoning_tokens == num_tokens
        create = anthropic_of(Engine(written)).messages.create
        message = await create(model="m", max_tokens=500, messages=ASKED)
        assert message.usage.output_tokens_details
        assert message.usage.output_tokens_details.thinking_tokens == num_tokens
        plain = await openai_of(Engine("Fine.")).chat.completions.create(model="m", messages=ASKED)
        assert plain.usage and plain.usage.completion_tokens_details
        assert plain.usage.completion_tokens_details.reasoning_tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize("begins", [0, WRITTEN.index("Let"), WRITTEN.index("<tool_call>")])
def test_a_stream_of_responses_tells_that_it_goes_on_while_a_call_is_written(
    begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.server.response_answers.QUIET_S", 0.0)
    tools: Any = [{"type": "function", "name": name} for name in ("get_weather", "now")]

    async def run() -> None:
        responses = openai_of(Engine(WRITTEN[begins:])).responses
        async with responses.stream(model="m", input="Weather?", tools=tools) as stream:
            events = [event async for event in stream]
            response: Any = await stream.get_final_response()
        assert len(events) > len(WRITTEN) - begins, "at least one for each token"
        calls = [it for it in response.output if it.type == "function_call"]
        assert [(it.name, json.loads(it.arguments)) for it in calls] == CALLS
        told = [it.type for it in response.output]
        for event in events:  # some clients replace what they have by what an event brings
            if event.type == "response.in_progress":
                given = [it.type for it in event.response.output]
                assert given == told[: len(given)]
                assert not given or event.response.output[-1].type == "function_call"
        numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
        assert numbers == sorted(numbers)

    asyncio.run(run())


def test_a_text_that_comes_behind_its_calls_belongs_to_their_turn() -> None:
    tools: Any = [{"type": "function", "name": "now"}]
    text: Any = {"role": "assistant", "content": "Let me see."}
    call: Any = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "1", "output": "12"}

    async def run() -> None:
        engine = Engine(WRITTEN)
        responses = openai_of(engine).responses
        for turn in ([text, call, result], [call, text, result], [call, result, text]):
            await responses.create(model="m", input=[*ASKED, *turn], tools=tools)
        first, second, third = engine.prompts
        assert second == first
        begun = [prompt.count("<|im_start|>assistant") for prompt in (second, third)]
        assert begun == [2, 3]

    asyncio.run(run())


def test_messages_of_one_turn_are_one_message() -> None:
    calls: Any = [
        {"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}}
        for id in "12"
    ]
    results: Any = [{"role": "tool", "tool_call_id": id, "content": "12"} for id in "12"]
    text: Any = {"role": "assistant", "content": "Let me see."}
    one: Any = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    other: Any = {"role": "assistant", "content": None, "tool_calls": calls[1:]}
    whole: Any = {**text, "tool_calls": calls}
    orders = ([whole], [text, one, other], [one, other, text])

    async def run() -> None:
        engine = Engine(WRITTEN)
        client = openai_of(engine)
        for turn in orders:
            messages = [*ASKED, *turn, *results]
            await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            body = {"model": "m", "messages": messages, "tools": TOOLS}
            answer = await client._client.post("/tokenize", json=body)
            assert TOKENIZER.decode(answer.json()["tokens"]) == engine.prompts[-1]
        assert len({*engine.prompts}) == 1 and len(engine.prompts) == len(orders)
        apart: Any = [*ASKED, text, text, {**one, "content": "Now."}, results[0], text]
        await client.chat.completions.create(model="m", messages=apart, tools=TOOLS)
        assert engine.prompts[-1].count("<|im_start|>assistant") == 5

    asyncio.run(run())


CODEX_TOOLS: Any = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}},
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: PATCH"}},
    {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object"}},
        {"type": "custom", "name": "ask"}]},
]  # fmt: skip
CODEX_WRITTEN = "".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
    for name, given in (
        ("apply_patch", {"input": "*** Begin"}),
        ("mcp__docs__find", {"q": 1}),
        ("mcp__docs__ask", {"input": ""}),
        ("apply_patch", {"other": 1}),
    )
)


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_of_codex_are_called_and_hosted_ones_are_left_out(is_stream: bool) -> None:
    async def run() -> None:
        engine = Engine(CODEX_WRITTEN)
        responses = openai_of(engine).responses
        how: Any = {"model": "m", "tools": CODEX_TOOLS}
        if is_stream:
            async with responses.stream(input="Go.", **how) as stream:
                events = [event async for event in stream]
                response: Any = await stream.get_final_response()
            done = [it for it in events if it.type == "response.custom_tool_call_input.done"]
            assert [it.input for it in done] == ["*** Begin", ""]
        else:
            response = await responses.create(input="Go.", **how)
        assert response.model_extra["tieredkv"] == {"left_out_tools": ["web_search"]}
        assert [(it.type, it.name, it.namespace) for it in response.output] == [
            ("custom_tool_call", "apply_patch", None),
            ("function_call", "find", "mcp__docs"),
            ("custom_tool_call", "ask", "mcp__docs"),
            ("function_call", "apply_patch", None),
        ]
        assert [it.input for it in response.output[::2]] == ["*** Begin", ""]
        [prompt] = engine.prompts
        assert "web_search" not in prompt and "start: PATCH" in prompt
        items: Any = [{"role": "user", "content": "Go."}]
        items += [it.model_dump(exclude_none=True) for it in response.output]
        for call in response.output:
            kind = f"{call.type.removesuffix('_call')}_call_output"
            items.append({"type": kind, "call_id": call.call_id, "output": "done"})
        await responses.create(input=items, **how)
        again = engine.prompts[-1].removeprefix(prompt)
        for name in ("apply_patch", "mcp__docs__find", "mcp__docs__ask"):
            assert f'"name": "{name}"' in again
        assert '"input": "*** Begin"' in again and again.count("done") == 4

    asyncio.run(run())


CLIENT_RUN: list[tuple[str, dict[str, Any], str, dict[str, Any], Any, str]] = [
    (
        "shell",
        {"commands": ["ls"], "timeout_ms": 5},
        "action",
        {},
        [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        '[{"stdout":"a.py","outcome":{"type":"exit","exit_code":0}}]',
    ),
    ("local_shell", {"command": ["ls"]}, "action", {"type": "exec", "env": {}}, "a.py", "a.py"),
    (
        "apply_patch",
        {"type": "create_file", "path": "a.py", "diff": "+pass"},
        "operation",
        {},
        "There is one.",
        "failed\nThere is one.",
    ),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "arguments", "field", "constants", "output", "told"),
    CLIENT_RUN,
    ids=[case[0] for case in CLIENT_RUN],
)
def test_tools_that_openai_knows_and_the_client_runs_are_called(
    kind: str,
    arguments: dict[str, Any],
    field: str,
    constants: dict[str, Any],
    output: Any,
    told: str,
    is_stream: bool,
) -> None:
    call = json.dumps({"name": kind, "arguments": arguments})
    of_other_types = dict.fromkeys(arguments, 5)
    wrong = [{"name": kind, "arguments": it} for it in ({"else": 1}, of_other_types)]
    written = [call, *map(json.dumps, wrong)]
    engine = Engine("".join(f"<tool_call>\n{it}\n</tool_call>" for it in written))
    how: Any = {"model": "m", "input": "List.", "tools": [{"type": kind}]}
    how["tool_choice"] = {"type": kind} if kind != "local_shell" else "required"

    async def run() -> None:
        responses = openai_of(engine).responses
        if is_stream:
            async with responses.stream(**how) as stream:
                names = [event.type async for event in stream]
                response: Any = await stream.get_final_response()
            assert names.count("response.output_item.done") == 3
        else:
            response = await responses.create(**how)
        item, *malformed = response.output
        assert (item.type, item.status) == (f"{kind}_call", "completed")
        given = getattr(item, field).model_dump(exclude_unset=True)
        assert given == {**constants, **arguments}
        assert [(it.type, it.name) for it in malformed] == [("function_call", kind)] * 2
        result = {"type": f"{kind}_call_output", "call_id": item.call_id, "output": output}
        result |= {"local_shell": {"id": item.id}, "apply_patch": {"status": "failed"}}.get(
            kind, {}
        )
        items: Any = [{"role": "user", "content": "List."}, item.model_dump(), result]
        await responses.create(model="m", input=items, tools=how["tools"])
        elsewhere: Any = {"type": kind, "environment": {"type": "container_auto"}}
        response = await responses.create(model="m", input="List.", tools=[elsewhere])
        assert response.model_extra["tieredkv"] == {"left_out_tools": [kind]}

    asyncio.run(run())
    first, second, third = engine.prompts
    assert f'"name": "{kind}"' in first and f'"name": "{kind}"' not in third
    printed = [json.loads(it) for it in re.findall(r'\{"name": .*"arguments".*\}', second)]
    assert json.loads(call) in printed and f"\n{told}<|im_end|>" in second


@pytest.mark.parametrize("is_stream", [False, True])
def test_custom_tools_of_chat_take_a_text(is_stream: bool) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tool: Any = {"type": "custom", "custom": {"name": "run", "format": grammar}}
    calls = [{"name": "run", "arguments": it} for it in ({"input": "ls"}, {"else": 1})]
    engine = Engine("".join(f"<tool_call>\n{json.dumps(it)}\n</tool_call>" for it in calls))
    how: Any = {"model": "m", "tools": [tool, *TOOLS]}
    chosen: Any = {"type": "custom", "custom": {"name": "run"}}

    async def run() -> None:
        chat = openai_of(engine).chat.completions
        answer = await chat.create(messages=ASKED, tool_choice=chosen, **how)
        if is_stream:
            chunks = [it async for it in await chat.create(messages=ASKED, stream=True, **how)]
            deltas = [it.choices[0].delta.tool_calls or [] for it in chunks if it.choices]
            told = [each.model_dump(exclude_none=True) for some in deltas for each in some]
            assert [it["type"] for it in told] == ["custom", "function"]
            assert told[0]["custom"] == {"name": "run", "input": "ls"}
        made: Any = answer.choices[0].message.tool_calls
        first, second = made
        assert first.type == "custom" and second.type == "function"
        assert (first.custom.name, first.custom.input) == ("run", "ls")
        assert json.loads(second.function.arguments) == {"else": 1}
        results: Any = [{"role": "tool", "tool_call_id": first.id, "content": "a.py"}]
        turn: Any = {"role": "assistant", "tool_calls": [first.model_dump()]}
        await chat.create(messages=[*ASKED, turn, *results], **how)

    asyncio.run(run())
    assert "regex grammar:\\n[a-z]+" in engine.prompts[0]
    assert json.dumps(calls[0]) in engine.prompts[-1]


def test_a_strict_server_refuses_hosted_tools_and_every_server_tools_of_one_name() -> None:
    def check(*tools: Any, is_strict: bool = False) -> None:
        body = {"model": "m", "input": "a", "tools": list(tools)}
        read(ResponsesRequest, body).check(Rules(Settings(), is_strict=is_strict))

    check(*CODEX_TOOLS)
    with refused(RequestError, param="tools", code="unsupported_parameter"):
        check(*CODEX_TOOLS, is_strict=True)
    with refused(RequestError, param="tools", code="invalid_value"):
        check(CODEX_TOOLS[0], CODEX_TOOLS[0])
    with refused(RequestError, param="tools", code="invalid_value"):
        check(*CODEX_TOOLS, {**CODEX_TOOLS[0], "name": "mcp__docs__find"})


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_message_has_the_calls_as_blocks_and_takes_their_results(is_stream: bool) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    tools.append({"name": "now", "input_schema": {"type": "object"}})

    async def run() -> None:
        engine = Engine(WRITTEN)
        messages = anthropic_of(engine).messages
        how: Any = {"model": "m", "max_tokens": 500, "tools": tools}
        if is_stream:
            async with messages.stream(messages=ASKED, **how) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await messages.create(messages=ASKED, **how)
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        thoughts, text, *calls = message.content
        assert (thoughts.thinking, bool(thoughts.signature)) == ("Hmm.", True)
        assert (text.text, message.stop_reason) == ("Let me see.", "tool_use")
        assert [(it.name, it.input) for it in calls] == CALLS
        results = [{"type": "tool_result", "tool_use_id": it.id, "content": "12"} for it in calls]
        turns: Any = [*ASKED, {"role": "assistant", "content": message.content}]
        turns.append({"role": "user", "content": results})
        await messages.create(messages=turns, **how)
        first, second = engine.prompts
        assert second.startswith(first + "Let me see.") and '"city": "Zürich"' in second

    asyncio.run(run())


def test_a_message_without_content_may_come_back() -> None:
    async def run() -> None:
        engine = Engine(str(TOKENIZER.decode(257)))  # the end of a message, and nothing else
        messages = anthropic_of(engine).messages
        how: Any = {"model": "m", "max_tokens": 9}
        message = await messages.create(**how, messages=ASKED)
        assert message.content == []
        turns: Any = [*ASKED, {"role": "assistant", "content": message.content}, *ASKED]
        await messages.create(**how, messages=turns)
        assert engine.prompts[1].count("<|im_start|>assistant") == 2

    asyncio.run(run())


def test_only_special_tokens_that_messages_are_written_with_are_shown() -> None:
    family = Family(
        name="x",
        start="<|im_start|>assistant\n",
        call=r"<\|reserved_0\|>",
        call_end=["<|reserved_1|>"],
    )
    tokenization = Tokenization(TOKENIZER, family=family)
    reading = tokenization.reading(Encoded([], []), TOOLS)
    assert reading is not None
    text = '<|bos|>Hi.<|reserved_2|><|reserved_0|>{"name": "now"}<|reserved_1|><|im_end|>'
    reply = Reply(EngineRequest(params=SamplingParams()), TOKENIZER, reading)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(token_ids) < len(text) - 50, "special tokens are one token each"
    for token_id in token_ids:
        reply.read(TokenOutput(request_id="a", token_ids=[token_id]))
    _, rest = reply.read(TokenOutput(request_id="a", token_ids=[], finish_reason="stop"))
    assert (reply.content, [call.name for call in reply.calls], rest) == ("Hi.", ["now"], [])
    assert reply.ends_with_calls
    plain = Reply(EngineRequest(params=SamplingParams()), TOKENIZER)
    plain.read(TokenOutput(request_id="a", token_ids=token_ids, finish_reason="stop"))
    assert plain.content == 'Hi.{"name": "now"}'


def test_thoughts_that_come_back_reach_the_chat_template() -> None:
    tokenizer = load_tokenizer("tiny-random")
    own = "{{- '<think>' + (message['reasoning_content'] or '') + '</think>' }}"
    printed = "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    assert printed in str(tokenizer.chat_template)
    tokenizer.chat_template = str(tokenizer.chat_template).replace(printed, printed + own)
    tokenization = Tokenization(tokenizer)
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    of_chat = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hmm.",
        "tool_calls": [call],
    }
    thinking = {"type": "thinking", "thinking": "Hmm.", "signature": "s"}
    used = {"type": "tool_use", "id": "1", "name": "now", "input": {}}
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hmm."}]}
    called = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "12"}
    output = {"type": "function_call_output", "call_id": "1", "output": "12"}
    bodies: list[tuple[Any, Any]] = [
        (
            ChatRequest,
            {"messages": [*ASKED, of_chat, {"role": "tool", "tool_call_id": "1", "content": "12"}]},
        ),
        (ResponsesRequest, {"input": [*ASKED, {**reasoning, "summary": []}, called, output]}),
        (
            MessagesRequest,
            {
                "max_tokens": 4,
                "messages": [
                    *ASKED,
                    {"role": "assistant", "content": [thinking, used]},
                    {"role": "user", "content": [result]},
                ],
            },
        ),
    ]
    rules = Rules(Settings(), is_strict=True)
    prompts = set()
    for kind, body in bodies:
        asked = read(kind, {"model": "m", **body}, rules.refuses).ask(tokenization, rules)
        prompts.add(str(tokenizer.decode(asked.prompts[0])))
    [prompt] = prompts
    assert prompt.count("<think>Hmm.</think>") == 1
    assert prompt.index("What is") < prompt.index("Hmm.") < prompt.index("now")


@pytest.mark.parametrize("how", [{"tools": TOOLS, "tool_choice": "none"}, {}])
def test_nothing_is_a_call_where_none_is_wanted(how: Any) -> None:
    async def run() -> None:
        chat = openai_of(Engine(WRITTEN)).chat.completions
        [choice] = (await chat.create(model="m", messages=ASKED, **how)).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert (choice.message.content or "").count("<tool_call>") == 2

    asyncio.run(run())


def test_an_image_is_a_note_in_the_prompt_unless_images_are_refused() -> None:
    url = "data:image/png;base64,aGk="
    parts: Any = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": url}},
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,"},
        },
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    ]
    items: Any = [
        {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [
                {"type": "input_image", "file_id": "f"},
                {"type": "input_file", "file_url": "https://example.com/a.pdf"},
            ],
        },
    ]

    async def run() -> None:
        engine = Engine("Hi.")
        client = openai_of(engine)
        turns: Any = [{"role": "user", "content": parts}]
        await client.chat.completions.create(model="m", messages=turns)
        await client.responses.create(model="m", input=items)
        notes = IMAGE_NOTE, DOCUMENT_NOTE, AUDIO_NOTE
        counts = [[prompt.count(note) for note in notes] for prompt in engine.prompts]
        assert counts == [[1, 1, 1], [2, 1, 0]]

    asyncio.run(run())
    refusing = Rules(Settings(images="refuse"))
    chat = read(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    response = read(ResponsesRequest, {"model": "m", "input": items})
    for body, path in ((chat, "messages[0].content[1]"), (response, "input[0].content[0]")):
        with refused(RequestError) as error:
            body.check(refusing)
        assert error.value.param == path


def test_a_call_that_was_cut_short_is_text() -> None:
    async def run() -> None:
        cut = '<tool_call>\n{"name": "now", "argu'
        chat = openai_of(Engine(cut, "length")).chat.completions
        [choice] = (await chat.create(model="m", messages=ASKED, tools=TOOLS)).choices
        assert (choice.finish_reason, choice.message.content) == ("length", cut)
        assert choice.message.tool_calls is None

    asyncio.run(run())


def test_what_was_whole_before_an_answer_was_cut_is_completed() -> None:
    tools: Any = [{"type": "function", "name": name} for name in ("get_weather", "now")]

    async def run() -> None:
        for written, last in ((WRITTEN, "completed"), (WRITTEN + " And", "incomplete")):
            responses = openai_of(Engine(written, "length")).responses
            response = await responses.create(model="m", input="Weather?", tools=tools)
            assert response.status == "incomplete"
            statuses = [getattr(item, "status", None) for item in response.output[1:]]
            assert statuses == ["completed"] * (len(statuses) - 1) + [last]

    asyncio.run(run())


def test_calls_before_a_stop_string_do_not_say_that_tools_are_to_be_called() -> None:
    async def run() -> None:
        chat = openai_of(Engine(WRITTEN + " and so on")).chat.completions
        asked = chat.create(model="m", messages=ASKED, tools=TOOLS, stop=["and so"])
        [choice] = (await asked).choices
        assert (choice.finish_reason, called(choice.message.tool_calls)) == ("stop", CALLS)

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_cannot_be_read_fails_alone(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: MessageParser, text: str) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(MessageParser, "feed", fail)

    async def run() -> None:
        engine = Engine(WRITTEN)
        chat = openai_of(engine).with_options(max_retries=0, timeout=10).chat.completions
        with refused(openai.InternalServerError):
            await chat.create(model="m", messages=ASKED, tools=TOOLS, stream=is_stream)
        await engine.writing  # the step in which other answers come, too

    asyncio.run(run())
    [record] = [each for each in caplog.records if each.exc_info]
    told(record.getMessage())


@pytest.mark.parametrize("name", ["<|im_end|>", "a b", "a.b", "ä", "a\n"])
def test_a_strict_server_refuses_names_of_tools_as_the_apis_do(name: str) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    user = {"role": "user", "content": "a"}
    asked: list[tuple[Any, dict[str, Any], str | None]] = [
        (ChatRequest, {"messages": [user], "tools": [tool]}, f"tools[0].{kind}.name")
        for kind, tool in (
            ("function", {"type": "function", "function": function}),
            ("custom", {"type": "custom", "custom": {"name": name}}),
        )
    ]
    asked += [
        (ChatRequest, {"messages": [user], "functions": [function]}, "functions[0].name"),
        (
            ResponsesRequest,
            {"input": "a", "tools": [{"type": "function", **function}]},
            "tools[0].name",
        ),
        (
            MessagesRequest,
            {
                "max_tokens": 1,
                "messages": [user],
                "tools": [{"name": name, "input_schema": {"type": "object"}}],
            },
            None,
        ),
    ]
    for kind, body, param in asked:
        request = read(kind, {"model": "m", **body})
        request.check(Rules(Settings()))
        with refused(RequestError) as caught:
            request.check(Rules(Settings(), is_strict=True))
        assert caught.value.param == param
