"""The task with the openai-agents package: `openai_agents chat|responses[-typed]`."""

import sys

import agents
import openai

from tests.e2e.programs import notes

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=notes.URL, api_key="any", max_retries=0)
api, _, is_typed = sys.argv[1].partition("-")
Model = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
agent = agents.Agent(
    name="Clerk",
    instructions=notes.SYSTEM,
    model=Model(model=notes.MODEL, openai_client=client),
    tools=[
        agents.function_tool(it, strict_mode=bool(is_typed))
        for it in (notes.read_note, notes.write_note)
    ],
    output_type=notes.City if is_typed else None,
)
output = agents.Runner.run_sync(
    agent, notes.task("notes-bare" if is_typed else "notes")
).final_output
notes.tell(output if is_typed else notes.City.model_validate_json(output))
