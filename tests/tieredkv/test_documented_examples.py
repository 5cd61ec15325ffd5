"""The examples of the APIs' documentation are served, and what they tell reaches the prompt."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from anthropic.types.beta import BetaMessage
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests import golden
from tests.golden import refused, told
from tests.tieredkv import documented_anthropic as of_anthropic
from tests.tieredkv import documented_openai as of_openai
from tests.tieredkv.documented_openai import Example
from tests.tieredkv.test_tool_calls import TOKENIZER, Engine, api_of, client_of, openai_of
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.app import Api
from tieredkv.server.asked import AUDIO_NOTE, Rules
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.responses_api import ResponsesRequest
from tieredkv.server.structure_fields import choose_tools


class Served:
    """A server in this process, and the texts of the prompts that its model was given."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine or Engine("Fine.")
        self.api: Api = api_of(self._engine, Settings(model="tiny-random"))

    def send(
        self, path: str, body: dict[str, Any] | None = None, method: str = "POST"
    ) -> httpx.Response:
        """Return the answer to a body, or its error."""

        async def send() -> httpx.Response:
            client: httpx.AsyncClient = client_of(self.api, httpx.AsyncClient)
            return await client.request(method, path, json={"model": "m", **(body or {})})

        return asyncio.run(send())

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a body as JSON; it must not be an error."""
        answer = self.send(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask_twice(self, path: str, example: Example) -> Any:
        """Return the answer to an example, whose texts are in its prompt, the same each time."""
        answer = self.ask(path, example.body)
        prompt = self.prompt
        assert [text for text in example.told if text not in prompt] == [], prompt
        self.ask(path, example.body)
        assert self.prompt == prompt, "the prefix must be found again"
        return answer

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return self._engine.prompts[-1]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Return a server that answers every prompt."""
    made = Served()
    yield made
    made.api.close()


def of(examples: list[Example]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", examples, ids=[each.name for each in examples])


@of(of_openai.RESPONSES)
def test_an_example_of_responses_is_served(example: Example, served: Served) -> None:
    answer = served.ask_twice("/v1/responses", example)
    assert answer.get("tieredkv", {}).get("left_out_tools", []) == [*example.left_out]
    assert Response.model_validate(answer).output_text == "Fine."


@of(of_openai.CHATS)
def test_an_example_of_chat_completions_is_served(example: Example, served: Served) -> None:
    answer = ChatCompletion.model_validate(served.ask_twice("/v1/chat/completions", example))
    assert answer.choices[0].message.content == "Fine."


def test_calls_and_recordings_of_old_messages_are_told_however_they_are_sent(
    served: Served,
) -> None:
    function = of_openai.CALLED["function"]
    called = {"role": "assistant", "content": None, "function_call": function, "tool_calls": None}
    given = {"role": "function", "name": "get_weather", "content": None}
    heard = {"role": "assistant", "content": "", "audio": {"id": "audio_1"}}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [of_openai.user("a"), called, given, heard, of_openai.user("b")]}
        answer = served.ask(path, body)
        prompt = served.prompt if path != "/tokenize" else TOKENIZER.decode(answer["tokens"])
        places = [prompt.index(it) for it in ('"Bern"', "tool\n<", AUDIO_NOTE, "b<")]
        assert places == sorted(places)
    said = {"role": "assistant", "content": "Words.", "audio": {"id": "audio_1"}}
    served.ask("/v1/chat/completions", {"messages": [said, of_openai.user("b")]})
    assert "Words." in served.prompt and AUDIO_NOTE not in served.prompt


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"role": "assistant", "function_call": "f"}, "function_call"),
        ({"role": "assistant", "function_call": {}}, "function_call.name"),
        ({"role": "function", "content": "a"}, "name"),
        ({"role": "function", "name": 5, "content": "a"}, "name"),
        ({"role": "function", "name": "f", "content": 0}, "content"),
        ({"role": "assistant", "audio": 5}, "audio"),
        ({"role": "assistant", "audio": {"id": "a"}, "content": 0}, "content"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_an_old_message_is_named(
    served: Served, wrong: dict[str, Any], param: str
) -> None:
    body = {"messages": [of_openai.user("a"), wrong, of_openai.user("b")]}
    answer = served.send("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[1].{param}"


def test_a_tool_that_chat_completions_do_not_have_is_left_out_unless_the_server_is_strict(
    served: Served,
) -> None:
    asked = [of_openai.user("a")]
    body: dict[str, Any] = {"messages": asked, "tools": [of_openai.OF_CHAT, of_openai.SEARCH]}
    alone = {"messages": asked, "tools": [of_openai.SEARCH], "tool_choice": "required"}
    forced = {**body, "tool_choice": {"type": "web_search"}}
    assert served.send("/v1/chat/completions", forced).json()["error"]["param"] == "tool_choice"
    for each in (body, alone):
        answer = served.ask("/v1/chat/completions", each)
        assert answer["tieredkv"] == {"left_out_tools": ["web_search"]}
        assert answer["choices"][0]["message"]["content"] == "Fine."
        assert "web_search" not in served.prompt
        tokens = served.ask("/tokenize", {name: each[name] for name in ("messages", "tools")})
        assert TOKENIZER.decode(tokens["tokens"]) == served.prompt
    with refused(RequestError, param="tools[1].type"):
        read(ChatRequest, {"model": "m", **body}).check(Rules(Settings(), is_strict=True))


@of(of_anthropic.MESSAGES)
def test_an_example_of_messages_is_served(example: Example, served: Served) -> None:
    answer = served.ask_twice("/v1/messages", example)
    assert answer.get("tieredkv", {}).get("left_out_tools", []) == [*example.left_out]
    assert [block.type for block in BetaMessage.model_validate(answer).content] == ["text"]
    counted = {name: each for name, each in example.body.items() if name != "max_tokens"}
    assert served.ask("/v1/messages/count_tokens", counted)["input_tokens"] > 0


def test_what_is_left_out_is_named_in_streams_and_once_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.server.asked._left_out", set())
    caplog.set_level("INFO", "tieredkv.server.asked")
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    messages = [of_openai.user("Go on.")]
    body = {"max_tokens": 9, "messages": messages, "tools": tools, "stream": True}
    for _ in range(2):
        start = json.loads(served.send("/v1/messages", body).text.split("data: ")[1].split("\n")[0])
        left_out = {"left_out_tools": ["web_search_20250305"]}
        assert start["message"]["tieredkv"] == left_out
    [record] = [each for each in caplog.records if each.name == "tieredkv.server.asked"]
    told(record.getMessage())


def test_a_tool_of_a_newer_type_is_left_out_unless_the_server_is_strict(served: Served) -> None:
    newer = {"type": "web_search_2030_01_01", "filters": None}
    body: dict[str, Any] = {"input": "Go on.", "tools": [of_openai.WEATHER, newer]}
    answer = served.ask("/v1/responses", body)
    assert answer["tieredkv"]["left_out_tools"] == [newer["type"]]
    assert answer["output"][0]["content"][0]["text"] == "Fine."
    chosen = served.send("/v1/responses", {**body, "tool_choice": {"type": newer["type"]}})
    assert chosen.status_code == 400
    with refused(RequestError):
        read(ResponsesRequest, {"model": "m", **body}).check(Rules(Settings(), is_strict=True))


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "required"}, "required"),
        ({"type": "any"}, "required"),
        ("any", "required"),
        ({"type": "tool", "name": "get_weather"}, {"type": "function", "name": "get_weather"}),
    ],
)
def test_a_choice_in_the_form_of_anthropic_is_taken(choice: Any, same: Any) -> None:
    def structure(given: Any) -> Any:
        body = {"model": "m", "messages": [of_openai.user("a")], "tools": [of_openai.OF_CHAT]}
        asked = read(ChatRequest, {**body, "tool_choice": given})
        asked.check(Rules(Settings()))
        how: Any = {"is_parallel": True, "text": None}
        return choose_tools(asked.chosen_tool, (of_openai.OF_CHAT,), asked.tool_names, **how)

    assert structure(choice) == structure(same)


def test_a_choice_of_what_is_neither_there_nor_left_out_is_refused(served: Served) -> None:
    wrong: list[dict[str, Any]] = [
        {"tool_choice": {"type": "web_search"}},
        {"tool_choice": "required"},
        {"tools": [of_openai.SEARCH], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [of_openai.SEARCH], "tool_choice": {"type": "allowed_tools", "tools": []}},
        {"tools": [of_openai.SEARCH], "tool_choice": {"type": "word"}},
        {"tools": [of_openai.SEARCH], "tool_choice": {"type": "apply_patch"}},
    ]
    allowed: list[dict[str, Any]] = [
        {"allowed_tools": 5},
        {"allowed_tools": []},
        {"mode": {}, "tools": [of_openai.WEATHER]},
        {"tools": [{"type": "function", "name": {}}]},
        {"tools": [{"type": []}, 5]},
    ]
    for given in allowed:
        choice = {"type": "allowed_tools", **given}
        wrong.append({"tools": [of_openai.WEATHER], "tool_choice": choice})
    for fields in wrong:
        answer = served.send("/v1/responses", {"input": "a", **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"
    answer = served.send(
        "/v1/messages",
        {"max_tokens": 9, "messages": [of_openai.user("a")], "tool_choice": {"type": "any"}},
    )
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("tool", "choice"),
    [
        ({"type": "web_search_preview"}, {"type": "web_search_preview"}),
        ({"type": "web_search"}, {"type": "allowed_tools", "mode": "required"}),
        ({"type": "image_generation"}, {"type": "image_generation"}),
        (of_openai.MCP, {"type": "mcp", "server_label": "dice", "name": "roll"}),
        ({"type": "shell", "environment": {"type": "container_auto"}}, {"type": "shell"}),
        ({"type": "computer_use_preview"}, {"type": "computer_use"}),
    ],
)
def test_a_choice_that_demands_a_hosted_tool_is_refused_by_its_name(
    tool: dict[str, Any], choice: dict[str, Any], served: Served
) -> None:
    if choice["type"] == "allowed_tools":
        choice = {**choice, "tools": [tool]}
    body = {"input": "a", "tools": [of_openai.WEATHER, tool], "tool_choice": choice}
    answer = served.send("/v1/responses", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tool_choice")
    golden.told(error["message"])


def test_a_choice_that_demands_a_hosted_tool_of_messages_is_refused_by_its_name(
    served: Served,
) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body: dict[str, Any] = {"max_tokens": 9, "messages": [of_openai.user("a")]}
    body["tools"] = [search, of_anthropic.WEATHER]
    choice = {"type": "tool", "name": "web_search"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = served.send(path, {**body, "tool_choice": choice})
        assert answer.status_code == 400
        golden.told(answer.json()["error"]["message"])


def test_where_only_hosted_tools_are_allowed_no_other_is_called() -> None:
    engine = Engine('<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>')
    served = Served(engine)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    tools = [of_openai.WEATHER, of_openai.SEARCH]
    body = {"input": "a", "tools": tools, "tool_choice": choice}
    [item] = served.ask("/v1/responses", body)["output"]
    served.api.close()
    assert item["type"] == "message"


@pytest.mark.parametrize(
    "how",
    [
        {"tool_choice": {"type": "function", "name": "ship"}},
        {"tool_choice": "required"},
        {"tools": [of_openai.WEATHER], "parallel_tool_calls": False},
    ],
)
def test_a_found_tool_may_be_called_where_answers_are_held_to_a_form(how: dict[str, Any]) -> None:
    grammars = list[str | None]()

    class Held(Engine):
        def submit(self, request: EngineRequest, take: Callable[[TokenOutput], None]) -> None:
            grammars.append(request.grammar)
            super().submit(request, take)

    served = Served(Held('<tool_call>\n{"name": "ship", "arguments": {}}\n</tool_call>'))
    output: Any = {"type": "tool_search_output", "call_id": "call_s", "execution": "client"}
    output["tools"] = [{**of_openai.WEATHER, "name": "ship"}]
    body = {"input": [of_openai.user("Ship it."), output, output], **how}  # found twice
    [item] = served.ask("/v1/responses", body)["output"]
    served.api.close()
    assert (item["type"], item["name"]) == ("function_call", "ship")
    [grammar] = grammars
    assert grammar is not None and '\\"name\\": \\"ship\\"' in grammar


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_that_the_client_finds_may_be_called(is_stream: bool) -> None:
    def call(name: str, **arguments: Any) -> str:
        given = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{given}\n</tool_call>"

    search: Any = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
    search["parameters"] = of_openai.schema(goal="string")
    ship = {**of_openai.WEATHER, "name": "ship", "defer_loading": True}
    found = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ship]}

    async def run() -> None:
        searches = Engine(call("tool_search", goal="ship it"))
        ships = Engine(call("crm__ship", location="Bern"))
        how: Any = {"model": "m", "tools": [search]}
        asked: Any = [of_openai.user("Ship it.")]
        apis = [api_of(engine, Settings(model="tiny-random")) for engine in (searches, ships)]
        responses = openai_of(apis[0]).responses
        if is_stream:
            async with responses.stream(input=asked, **how) as stream:
                names = [event.type async for event in stream]
                first: Any = await stream.get_final_response()
            assert names.count("response.output_item.done") == 1
        else:
            chosen: Any = {"type": "tool_search"}
            first = await responses.create(input=asked, tool_choice=chosen, **how)
        [item] = first.output
        assert (item.type, item.execution, item.arguments) == (
            "tool_search_call",
            "client",
            {"goal": "ship it"},
        )
        assert "Finds tools." in searches.prompts[0] and "tieredkv" not in first.model_extra
        output = {"type": "tool_search_output", "call_id": item.call_id, "execution": "client"}
        items = [*asked, item.model_dump(), {**output, "status": "completed", "tools": [found]}]
        second: Any = await openai_of(apis[1]).responses.create(input=items, **how)
        assert [(it.type, it.namespace, it.name) for it in second.output] == [
            ("function_call", "crm", "ship")
        ]
        [first_prompt], [prompt] = searches.prompts, ships.prompts
        assert prompt.startswith(first_prompt), "the prefix must be found again"
        for shown in ('"goal": "ship it"', '"name":"crm__ship"'):
            assert shown in prompt.removeprefix(first_prompt)
        for api in apis:
            api.close()

    asyncio.run(run())
