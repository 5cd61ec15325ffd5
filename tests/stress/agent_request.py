"""Measures what a request of a coding agent costs the server before the engine has it.

    python -m tests.stress.agent_request

An agent with 20 tools sends its whole conversation with each turn: here the 200th, 201 messages of
which every other is the result of a call. Each of the three chat APIs takes it, with default
settings; for `/v1/messages` the system prompt and the last two turns are marked with
`cache_control`, as Claude Code marks them. The time is the processor's, of all threads, from the
body that the application is called with to the request that it gives to the engine. It is compared
with what nobody can save: one rendering of the chat template by transformers and one encoding by
the tokenizer, of the same conversation. Both are measured in turns in this process:

\b
    same         the same conversation again and again, of which the server knows all pieces
    next         the conversation grows by a turn each time, as an agent's does
    first        each conversation comes to a server that has not seen a part of it before

The template is Qwen2.5's. The tokenizer is trained on the spot, on the text of this project, which
the conversation consists of, too. The last line is JSON; `bar` is what must not be exceeded.
"""

import asyncio
import copy
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import click
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.stress.hostile_bodies import SPECIAL, SPLIT
from tieredkv.bench import raw
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, RequestUsage, TokenOutput
from tieredkv.server import threads
from tieredkv.server.app import Api, build_app
from tieredkv.server.keys import Keys
from tieredkv.server.tokenizations import make_tokenization

BAR = 1.5
NUM_TOOLS, NUM_MESSAGES = 20, 201
RESULT_CHARACTERS = 1600
ROOT = Path(__file__).resolve().parents[2]
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MAX_MODEL_LEN = 262_144

QWEN_2_5 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and " }}
    {{- "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": " }}
    {{- "<function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

Json = dict[str, Any]


def project_text() -> str:
    """Return the text of this project's pages and sources."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("storage/*.py")])
    return "\n".join(page.read_text() for page in pages)


def trained(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of Qwen2.5's form that was trained on a text."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=made, eos_token=SPECIAL[2], chat_template=QWEN_2_5
    )
    return tokenizer


# --- The conversation, as chat templates take it and as each API does


def conversation(text: str, num_messages: int) -> list[Json]:
    """Return a conversation of an agent, as chat templates take it, system message included."""
    pieces = itertools.cycle(
        text[at : at + RESULT_CHARACTERS] for at in range(0, len(text), RESULT_CHARACTERS)
    )
    messages: list[Json] = [
        {"role": "system", "content": "You are a coding agent.\n" + next(pieces) * 6},
        {"role": "user", "content": "Find out why the test fails, and mend it."},
    ]
    for i in range((num_messages - 1) // 2):
        name, path = f"tool_{i % NUM_TOOLS}", f"src/package_{i % 7}/module_{i}.py"
        function = {"name": name, "arguments": {"path": path, "limit": 40 + i, "all": True}}
        said = f"I look at {path} next." if i % 3 == 0 else ""
        calls = [{"id": f"call_{i:08}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        result = {"role": "tool", "tool_call_id": f"call_{i:08}", "content": next(pieces)}
        messages.append(result)
    return messages


def offered() -> list[Json]:
    """Return the tools, as chat templates take them."""
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The file, from the project's root."},
            "limit": {"type": "integer", "description": "At most so many lines.", "minimum": 1},
            "all": {"type": "boolean", "description": "Whether hidden files count, too."},
            "kinds": {"type": "array", "items": {"type": "string", "enum": ["py", "md", "toml"]}},
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    about = "Reads a file or a folder of the project, and returns what is there as text. " * 3
    return [
        {
            "type": "function",
            "function": {"name": f"tool_{i}", "description": about, "parameters": schema},
        }
        for i in range(NUM_TOOLS)
    ]


def as_text(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def chat_body(messages: list[Json], tools: list[Json]) -> Json:
    """Return the body of `POST /v1/chat/completions`."""
    given = [
        {**it, "content": it["content"] or None, "tool_calls": [*map(as_text, it["tool_calls"])]}
        if "tool_calls" in it
        else it
        for it in messages
    ]
    return {"messages": given, "tools": tools}


def messages_body(messages: list[Json], tools: list[Json]) -> Json:
    """Return the body of `POST /v1/messages`."""
    mark: Json = {"cache_control": {"type": "ephemeral"}}
    turns = list[Json]()
    for message in messages[1:]:
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        match message["role"]:
            case "assistant":
                calls = [(it["id"], it["function"]) for it in message["tool_calls"]]
                used = [
                    {"type": "tool_use", "id": id, "name": it["name"], "input": it["arguments"]}
                    for id, it in calls
                ]
                turns.append({"role": "assistant", "content": [*text, *used]})
            case "tool":
                id = message["tool_call_id"]
                result = {"type": "tool_result", "tool_use_id": id, "content": text}
                turns.append({"role": "user", "content": [result]})
            case _:
                turns.append({"role": "user", "content": text})
    for turn in (it for it in turns[-3:] if it["role"] == "user"):
        turn["content"][-1] |= mark
    functions = [it["function"] for it in tools]
    given = [
        {"name": it["name"], "description": it["description"], "input_schema": it["parameters"]}
        for it in functions
    ]
    system = [{"type": "text", "text": messages[0]["content"], **mark}]
    return {"max_tokens": 64, "system": system, "messages": turns, "tools": given}


def responses_body(messages: list[Json], tools: list[Json]) -> Json:
    """Return the body of `POST /v1/responses`."""
    items = list[Json]()
    for message in messages[1:]:
        match message["role"]:
            case "assistant":
                part = {"type": "output_text", "text": message["content"], "annotations": []}
                if message["content"]:
                    items.append({"type": "message", "role": "assistant", "content": [part]})
                items += [
                    {"type": "function_call", "call_id": it["id"], **as_text(it)["function"]}
                    for it in message["tool_calls"]
                ]
            case "tool":
                id, output = message["tool_call_id"], message["content"]
                items.append({"type": "function_call_output", "call_id": id, "output": output})
            case _:
                part = {"type": "input_text", "text": message["content"]}
                items.append({"type": "message", "role": "user", "content": [part]})
    given = [{"type": "function", **it["function"]} for it in tools]
    instructions = messages[0]["content"]
    return {"instructions": instructions, "input": items, "tools": given, "store": False}


APIS: dict[str, Callable[[list[Json], list[Json]], Json]] = {
    "/v1/chat/completions": chat_body,
    "/v1/messages": messages_body,
    "/v1/responses": responses_body,
}


# --- The measurement


class Engine:
    """Stands in for the engine: it takes a request and ends its answer at once.

    Attributes:
        took: the requests so far, each with the processor's time when it came.
    """

    is_alive, pid, stats = True, 1, dict[str, Any]()
    trouble: str | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._end_id = int(cast(Any, tokenizer).eos_token_id)
        self.took: list[tuple[float, EngineRequest]] = []
        self.info = EngineInfo(
            model="m",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=len(tokenizer),
            block_size=16,
            worker_pid=None,
            eos_token_ids=[self._end_id],
        )

    def submit(self, request: EngineRequest, take: Callable[[TokenOutput], None]) -> None:
        self.took.append((time.process_time(), request))
        output = TokenOutput(
            request_id=request.request_id,
            token_ids=[self._end_id],
            finish_reason="stop",
            usage=RequestUsage(prompt_tokens=len(request.prompt_token_ids)),
        )
        asyncio.get_running_loop().call_soon(take, output)

    def abort(self, request_id: str) -> None:
        """Do nothing: each answer has ended."""


class Taken(NamedTuple):
    """The processor's seconds from a body to the engine's request, and that request."""

    seconds: float
    request: EngineRequest


async def send(app: Any, engine: Engine, path: str, body: bytes) -> Taken:
    """Have the application take a body."""
    status, messages = list[int](), [{"type": "http.request", "body": body}]

    async def receive() -> Json:
        if messages:
            return messages.pop()
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def keep(message: Json) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    num_before, began_at = len(engine.took), time.process_time()
    await app(scope, receive, keep)
    assert status == [200], f"{path} was answered with {status}"
    [(ended_at, request)] = engine.took[num_before:]
    return Taken(ended_at - began_at, request)


def unavoidable(
    tokenizer: PreTrainedTokenizerFast, messages: list[Json], tools: list[Json]
) -> tuple[float, float, list[int]]:
    """Return the processor's seconds of one rendering and one encoding, and the token ids."""
    given: Any = messages
    began_at = time.process_time()
    text = cast(
        str,
        tokenizer.apply_chat_template(
            given, cast(Any, tools), tokenize=False, add_generation_prompt=True
        ),
    )
    rendered_at = time.process_time()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return rendered_at - began_at, time.process_time() - rendered_at, ids


def api_of(tokenizer: PreTrainedTokenizerFast, engine: Engine) -> Api:
    """Return a server's routes, with default settings."""
    settings = Settings(model="m")
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    tokenization = make_tokenization(tokenizer, settings, MAX_MODEL_LEN)
    tokenization.try_template()
    return Api(settings, cast(Any, engine), tokenization, keys)


def talks(text: str, kind: str, num_messages: int, repeats: int) -> Iterator[list[Json]]:
    """Yield the conversations of one kind of measurement."""
    longest = conversation(text, num_messages + 2 * repeats)
    for i in range(repeats):
        more = 2 * i if kind == "next" else 0
        yield copy.deepcopy(longest[: 1 + num_messages + more])


async def measure(
    tokenizer: PreTrainedTokenizerFast, text: str, kind: str, num_messages: int, repeats: int
) -> list[Json]:
    """Measure one kind of request on all APIs, and check what the engine gets.

    The first round is a warm-up.
    """
    engine, tools = Engine(tokenizer), offered()
    api = api_of(tokenizer, engine)
    app = build_app(api)
    seconds: dict[str, list[tuple[float, float, float]]] = {path: [] for path in APIS}
    bytes_of = dict[str, int]()
    num_tokens = 0
    for round, messages in enumerate(talks(text, kind, num_messages, repeats + 1)):
        for path, make in APIS.items():
            encoded = json.dumps({"model": "m", **make(messages, tools)}).encode()
            if kind == "first":
                api.close()
                api = api_of(tokenizer, engine)
                app = build_app(api)
            gc.collect()
            one = unavoidable(tokenizer, messages, tools)
            taken = await send(app, engine, path, encoded)
            other = unavoidable(tokenizer, messages, tools)
            assert taken.request.prompt_token_ids == one[2], f"{path}: another prompt"
            if round:
                rendering, encoding = (one[0] + other[0]) / 2, (one[1] + other[1]) / 2
                seconds[path].append((taken.seconds, rendering, encoding))
            bytes_of[path], num_tokens = len(encoded), len(one[2])
    api.close()
    return [row(path, kind, seconds[path], bytes_of[path], num_tokens) for path in APIS]


def row(
    path: str, kind: str, seconds: list[tuple[float, float, float]], size: int, num_tokens: int
) -> Json:
    server, rendering, encoding = (statistics.median(each) for each in zip(*seconds, strict=True))
    factors = [taken / (rendered + encoded) for taken, rendered, encoded in seconds]
    return {
        "api": path,
        "conversation": kind,
        "body_bytes": size,
        "prompt_tokens": num_tokens,
        "server_ms": round(1e3 * server, 2),
        "rendering_ms": round(1e3 * rendering, 2),
        "encoding_ms": round(1e3 * encoding, 2),
        "factor": round(statistics.median(factors), 3),
    }


@click.command(help=__doc__)
@click.option("--repeats", default=15, show_default=True, help="The median is reported.")
@click.option("--messages", "num_messages", default=NUM_MESSAGES, show_default=True)
@click.option("--vocab-size", default=32_000, show_default=True, help="Of the tokenizer.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(repeats: int, num_messages: int, vocab_size: int, commit: str | None) -> None:
    text = project_text()
    tokenizer = trained(text, vocab_size)
    # An idle server gives memory back to the system, which is no part of a request.
    with mock.patch.object(threads, "TRIM_AFTER_S", 3600.0):
        rows = [
            each
            for kind in ("same", "next", "first")
            for each in asyncio.run(measure(tokenizer, text, kind, num_messages, repeats))
        ]
    for each in rows:
        click.echo("{api:22} {conversation:6} {server_ms:8} ms, {factor} times".format(**each))
    report = raw.head(commit, "python -m tests.stress.agent_request")
    about = {"model": f"Qwen2.5's template, {vocab_size} tokens", "tools": NUM_TOOLS}
    worst = max(each["factor"] for each in rows)
    about |= {"messages": num_messages, "bar": BAR, "worst_factor": worst, "rows": rows}
    click.echo(json.dumps(report | about))


if __name__ == "__main__":
    main()
