"""The examples of both APIs' pages on prompt caching, on a server with the same limits."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import http
from tests.golden import told
from tests.serving import Server, running

BLOCK = 16
MODEL = "tiny-random"
AS_STRICT = (
    *("--strict-params", "--max-retention", "in_memory", "--default-retention", "in_memory"),
    *("--min-cache-tokens", "1024"),
    *("--cache-lookback", "20", "--anthropic-implicit", "off"),
)
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
BOOK = "It is a truth universally acknowledged, that a book is long. " * 20
TOOLS = [
    {
        "name": name,
        "description": f"Get {name.replace('_', ' ')}. " * 8,
        "input_schema": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "San Francisco, CA"}},
            "required": ["location"],
        },
    }
    for name in ("the_weather", "the_time", "the_tide", "the_news")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that has the minimum, lookback and strictness of the documents."""
    with running(tmp_path_factory.mktemp("documents"), *AS_STRICT) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def send(server: Server, path: str, **fields: Any) -> httpx.Response:
    """Send a body and return the response."""
    return http.post(f"{server.url}/{path}", json={"model": MODEL, **fields})


def post(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    """Send a body that must be answered; return the decoded answer."""
    answer = send(server, path, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


# --- Anthropic


def message(server: Server, **fields: Any) -> tuple[int, int, int]:
    """Send a message; return its tokens read, written, and after the last breakpoint."""
    usage = post(server, "messages", **{"max_tokens": 4, **fields})["usage"]
    told = [usage[f"{it}input_tokens"] for it in ("cache_read_", "cache_creation_", "")]
    assert sum(usage["cache_creation"].values()) == told[1]
    return told[0], told[1], told[2]


def text(words: str, control: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a text block, with a `cache_control` if one is given."""
    marked = {"cache_control": control} if control else {}
    return {"type": "text", "text": words, **marked}


def user(*content: Any) -> dict[str, Any]:
    """Return a turn of the user."""
    return {"role": "user", "content": list(content)}


def test_a_large_context_is_cached(server: Server) -> None:
    system = [text("You analyze literary works."), text(f"context {BOOK}", EPHEMERAL)]
    asked = {"system": system, "messages": [user(text("Analyze the major themes."))]}
    read, written, rest = message(server, **asked)
    assert read == 0 and written >= 1024 and rest > 0
    assert message(server, **asked) == (written, 0, rest)
    other = {**asked, "messages": [user(text("Who is the author?"))]}
    assert message(server, **other)[:2] == (written, 0)


def test_tool_definitions_are_cached(server: Server) -> None:
    tools: list[Any] = [*TOOLS[:3], {**TOOLS[3], "cache_control": EPHEMERAL}]
    asked: dict[str, Any] = {"tools": tools, "messages": [user(text("The weather?"))]}
    _, written, _ = message(server, **asked)
    assert written >= 1024
    assert message(server, **asked | {"messages": [user(text("The time?"))]})[:2] == (written, 0)
    changed = [{**tools[0], "description": "Other"}, *tools[1:]]
    assert message(server, **asked | {"tools": changed})[0] == 0


@pytest.mark.parametrize("is_automatic", [True, False])
def test_a_conversation_is_cached_turn_by_turn(server: Server, is_automatic: bool) -> None:
    turns: list[dict[str, Any]] = []
    kept = 0
    for i in range(4):
        last = None if is_automatic else EPHEMERAL
        turns.append(
            user(text(f"{is_automatic} turn {i} {BOOK if i == 0 else 'and on' * 20}", last))
        )
        top = {"cache_control": EPHEMERAL} if is_automatic else {}
        read, written, rest = message(server, messages=turns, **top)
        assert read == kept, i
        assert written > 0 and rest < 64
        kept = read + written
        turns[-1]["content"][0].pop("cache_control", None)
        turns.append({"role": "assistant", "content": "Good question."})


def test_all_of_it_together_with_four_breakpoints(server: Server) -> None:
    tools = [{**TOOLS[0], "name": "search"}, *TOOLS[1:3], {**TOOLS[3], "cache_control": HOUR}]
    system = [text("You are a helpful research assistant.", HOUR), text(BOOK, EPHEMERAL)]
    turns = [
        user(text("Can you search for information about Mars rovers?")),
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "search", "input": {}}],
        },
        user({"type": "tool_result", "tool_use_id": "t1", "content": "Document 1: Exploration"}),
        {"role": "assistant", "content": [text("I found documents.")]},
        user(text("Yes, please tell me about Perseverance.", EPHEMERAL)),
    ]
    asked: dict[str, Any] = {"tools": tools, "system": system}
    usage = post(server, "messages", max_tokens=4, **asked, messages=turns)["usage"]
    by_ttl = usage["cache_creation"]
    assert all(by_ttl.values()) and usage["input_tokens"] < 64
    again = message(server, **asked, messages=turns)
    assert again[:2] == (sum(by_ttl.values()), 0)
    fewer = message(server, **asked, messages=[user(text("Another one", EPHEMERAL))])
    assert fewer[0] >= by_ttl["ephemeral_1h_input_tokens"] + len(BOOK) // BLOCK * BLOCK - BLOCK


def test_a_prefix_is_warmed_before_it_is_asked_for(server: Server) -> None:
    system = [text(f"warm {BOOK}", EPHEMERAL)]
    asked: dict[str, Any] = {"system": system, "messages": [user(text("warmup"))]}
    warmed = post(server, "messages", max_tokens=0, **asked)
    assert (warmed["content"], warmed["stop_reason"]) == ([], "max_tokens")
    written = warmed["usage"]["cache_creation_input_tokens"]
    assert written >= 1024
    assert message(server, **asked | {"messages": [user(text("Go"))]})[:2] == (written, 0)


def test_short_or_unmarked_prefixes_are_not_cached(server: Server) -> None:
    for _ in range(2):
        assert message(server, messages=[user(text("Too short" * 50, EPHEMERAL))])[:2] == (0, 0)
        assert message(server, system=BOOK, messages=[user(text("No mark"))])[:2] == (0, 0)


def test_a_hit_is_at_most_twenty_positions_before_a_breakpoint(server: Server) -> None:
    head = text(f"lookback {BOOK}")
    _, written, _ = message(server, messages=[user({**head, "cache_control": EPHEMERAL})])
    for count, read in ((19, written), (20, 0)):
        parts = [text(f"{count} {i} " * BLOCK) for i in range(count)]
        parts[-1]["cache_control"] = EPHEMERAL
        assert message(server, messages=[user(head, *parts)])[0] == read


# --- OpenAI


def details(server: Server, path: str, **fields: Any) -> tuple[int, int]:
    """Send a prompt; return how many of its tokens were found and written."""
    usage = post(server, path, **fields)["usage"]
    told = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return told["cached_tokens"], told["cache_write_tokens"]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_prompt_of_1024_tokens_is_cached_and_a_shorter_one_is_not(
    server: Server, path: str
) -> None:
    def ask(words: str) -> tuple[int, int]:
        own: dict[str, Any] = {"input": words, "max_output_tokens": 4}
        if path != "responses":
            own = {"messages": [{"role": "user", "content": words}], "max_completion_tokens": 4}
        key = {"prompt_cache_key": "user-1", "prompt_cache_retention": "in_memory"}
        return details(server, path, **own, **key)

    long, short = f"{path} {BOOK}", f"{path} {BOOK}"[:900]
    _, written = ask(long)
    assert written >= 1024
    assert ask(long) == (written, 0)
    assert [ask(short) for _ in range(2)] == [(0, 0)] * 2


def test_explicit_breakpoints_end_what_is_cached(server: Server) -> None:
    plain = {"type": "input_text", "text": f"stable {BOOK}"}
    breakpoint_part = {**plain, "prompt_cache_breakpoint": {"mode": "explicit"}}

    def ask(part: dict[str, Any], question: str, **options: Any) -> tuple[int, int]:
        content = [part, {"type": "input_text", "text": question}]
        return details(
            server,
            "responses",
            input=[{"role": "user", "content": content}],
            prompt_cache_options={"mode": "explicit", **options},
            max_output_tokens=4,
        )

    assert ask(plain, "Without a breakpoint?") == (0, 0)
    _, written = ask(breakpoint_part, "Warm", prewarm=True)
    assert written >= 1024
    assert ask(breakpoint_part, "What is it about?" * 9, ttl="30m") == (written, 0)


FUNCTION: dict[str, Any] = {
    "name": "get_current_weather",
    "description": "Get the current weather in a given location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city, e.g. San Francisco, CA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location", "unit"],
    },
}
DEVELOPER = {"role": "developer", "content": "You are a helpful assistant."}
BREAKPOINT = {"mode": "explicit"}
DOCUMENTED: dict[str, tuple[str, dict[str, Any]]] = {
    "text input": ("responses", {"input": "Tell me a three sentence bedtime story."}),
    "instructions": (
        "responses",
        {"instructions": "You are a helpful assistant.", "input": "Hello!", "stream": True},
    ),
    "functions of responses": (
        "responses",
        {
            "tools": [{"type": "function", **FUNCTION}],
            "input": "What is the weather like in Boston today?",
            "tool_choice": "auto",
        },
    ),
    "reasoning": (
        "responses",
        {"input": "How much wood would a woodchuck chuck?", "reasoning": {"effort": "high"}},
    ),
    "breakpoints of responses": (
        "responses",
        {
            "prompt_cache_key": "tenant-1",
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
            "input": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "input_text",
                            "text": "A long document",
                            "prompt_cache_breakpoint": BREAKPOINT,
                        },
                        {"type": "input_text", "text": "A question"},
                    ],
                }
            ],
        },
    ),
    "default": (
        "chat/completions",
        {"messages": [DEVELOPER, {"role": "user", "content": "Hello!"}]},
    ),
    "functions": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "What's the weather like in Boston today?"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
        },
    ),
    "logprobs": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "Hello!"}], "logprobs": True, "top_logprobs": 2},
    ),
    "breakpoints": (
        "chat/completions",
        {
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
            "messages": [
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": "Rules", "prompt_cache_breakpoint": BREAKPOINT}
                    ],
                },
                {"role": "user", "content": "Hello!"},
            ],
        },
    ),
    "completion": (
        "completions",
        {"prompt": "Say this is a test", "max_tokens": 7, "temperature": 0},
    ),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_example_of_the_documents_is_answered_by_a_strict_server(
    server: Server, name: str
) -> None:
    path, fields = DOCUMENTED[name]
    limit = {} if "max_tokens" in fields else {"max_tokens": 4}
    if path == "responses":
        limit = {"max_output_tokens": 4}
    answer = send(server, path, **fields, **limit)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        assert answer.json()["usage"]["total_tokens"] > 4


def test_a_strict_server_refuses_what_is_unknown_and_what_it_may_not_keep(server: Server) -> None:
    long_lived = send(server, "responses", input="a", prompt_cache_options={"ttl": "12h"})
    assert long_lived.status_code == 400
    assert long_lived.json()["error"]["param"] == "prompt_cache_options.ttl"
    part = {"type": "text", "text": "a", "of_tomorrow": 1}
    inside = send(server, "chat/completions", messages=[{"role": "user", "content": [part]}])
    assert inside.json()["error"]["param"] == "messages[0].content[0].of_tomorrow"
    told(inside.json()["error"]["message"])
    fine = send(
        server,
        "responses",
        input="a",
        tools=[{"type": "function", **FUNCTION}],
        reasoning={"effort": "low"},
        truncation="auto",
        include=[],
        user="u",
        max_output_tokens=1,
        top_p=1,
        stop=None,
    )
    assert fine.status_code == 200, fine.text
