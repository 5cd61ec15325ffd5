"""The task with more agent frameworks: `more_agents NAME chat|responses|messages [typed]`."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.e2e.programs import notes
from tests.e2e.programs.notes import MODEL, ROOT, SYSTEM, URL, City

TOOLS = [notes.read_note, notes.write_note]


def agno(api: str, output: type[City] | None) -> Any:
    """Run an agent of agno."""
    from agno.agent import Agent
    from agno.models.anthropic import Claude
    from agno.models.openai import OpenAILike, OpenAIResponses

    how: Any = {"id": MODEL, "api_key": "any"}
    models: dict[str, Callable[[], Any]] = {
        "chat": lambda: OpenAILike(**how, base_url=URL),
        "responses": lambda: OpenAIResponses(**how, base_url=URL),
        "messages": lambda: Claude(**how, client_params={"base_url": ROOT}),
    }
    agent = Agent(
        model=models[api](), instructions=SYSTEM, tools=TOOLS, output_schema=output, telemetry=False
    )
    return agent.run(script_of(output)).content


def haystack(api: str, output: type[City] | None) -> Any:
    """Run an agent of Haystack."""
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import (
        OpenAIChatGenerator,
        OpenAIResponsesChatGenerator,
    )
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    kind: Any = OpenAIChatGenerator if api == "chat" else OpenAIResponsesChatGenerator
    model = kind(api_key=Secret.from_token("any"), model=MODEL, api_base_url=URL)
    tools = [create_tool_from_function(tool) for tool in TOOLS]
    agent = Agent(chat_generator=model, tools=tools, system_prompt=SYSTEM)
    return agent.run(messages=[ChatMessage.from_user(script_of(output))])["messages"][-1].text


def langchain(_api: str, output: type[City] | None) -> Any:
    """Run an agent of LangChain with Anthropic's API."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_anthropic import ChatAnthropic

    thinking = None if output else {"type": "adaptive"}
    how: Any = {"base_url": ROOT, "api_key": "any", "max_tokens": 500, "thinking": thinking}
    form = ProviderStrategy(output) if output else None
    model = ChatAnthropic(model=MODEL, **how)
    agent: Any = create_agent(model, TOOLS, system_prompt=SYSTEM, response_format=form)
    state = agent.invoke({"messages": [("user", script_of(output))]})
    return state["structured_response"] if output else state["messages"][-1].text


def smolagents(_api: str, _output: type[City] | None) -> Any:
    """Run an agent of smolagents, which answers with a call."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key="any")
    agent = ToolCallingAgent(tools=[tool(it) for it in TOOLS], model=model)
    return agent.run(notes.task("notes-final"))


def strands(api: str, _output: type[City] | None) -> Any:
    """Run an agent of Strands."""
    from strands import Agent, tool
    from strands.models.anthropic import AnthropicModel
    from strands.models.openai import OpenAIModel
    from strands.models.openai_responses import OpenAIResponsesModel

    kinds: dict[str, Any] = {"chat": OpenAIModel, "responses": OpenAIResponsesModel}
    if api == "messages":
        client = {"base_url": ROOT, "api_key": "any"}
        model: Any = AnthropicModel(client_args=client, model_id=MODEL, max_tokens=500)
    else:
        model = kinds[api](client_args={"base_url": URL, "api_key": "any"}, model_id=MODEL)
    tools = [tool(it) for it in TOOLS]
    agent = Agent(model=model, system_prompt=SYSTEM, tools=tools, callback_handler=None)
    return str(agent(script_of(None)))


def script_of(output: type[City] | None) -> str:
    """Return the message of the user."""
    return notes.task("notes-bare" if output else "notes")


os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
name, api, *typed = sys.argv[1:]
said: Any = globals()[name](api, City if typed else None)
if isinstance(said, str):  # agno puts the texts of all turns together
    said = json.loads(said[said.index("{") :])
notes.tell(City.model_validate(said))
