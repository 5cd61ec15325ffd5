"""The task with pydantic-ai: `pydantic_agent tool|native|prompted [anthropic]`."""

import sys
from typing import Any

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.programs import notes

model: Any
if sys.argv[2:] == ["anthropic"]:
    provider = AnthropicProvider(base_url=notes.ROOT, api_key="any")
    model = AnthropicModel(notes.MODEL, provider=provider)
else:
    model = OpenAIChatModel(notes.MODEL, provider=OpenAIProvider(base_url=notes.URL, api_key="any"))
outputs: dict[str, Any] = {
    "tool": ToolOutput(notes.City, name="final_result"),
    "native": NativeOutput(notes.City),
    "prompted": PromptedOutput(notes.City),
}
agent: Any = Agent(
    model,
    instructions=notes.SYSTEM,
    tools=[notes.read_note, notes.write_note],
    output_type=outputs[sys.argv[1]],
)
script = "notes-result" if sys.argv[1] == "tool" else "notes-bare"
notes.tell(agent.run_sync(notes.task(script)).output)
