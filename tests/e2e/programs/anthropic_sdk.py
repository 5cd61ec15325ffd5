"""The task with Anthropic's package, whose runner calls the tools: `anthropic_sdk run|stream`."""

import sys
from typing import Any

import anthropic

from tests.e2e.programs import notes

client = anthropic.Anthropic(base_url=notes.ROOT, api_key="any", max_retries=0)
marked: Any = [{"type": "text", "text": notes.SYSTEM, "cache_control": {"type": "ephemeral"}}]
asked: dict[str, Any] = {
    "model": notes.MODEL,
    "max_tokens": 1000,
    "system": marked,
    "tools": [anthropic.beta_tool(notes.read_note), anthropic.beta_tool(notes.write_note)],
    "cache_control": {"type": "ephemeral"},  # on the last block that may have one
}
messages: list[Any] = [{"role": "user", "content": notes.task("notes")}]
is_stream = sys.argv[1] == "stream"
runner: Any = client.beta.messages.tool_runner(**asked, messages=messages, stream=is_stream)
for answer in runner:
    message = answer.get_final_message() if is_stream else answer
    messages.append({"role": "assistant", "content": message.to_dict()["content"]})
    if (results := runner.generate_tool_call_response()) is not None:
        messages.append(results)
city = notes.City.model_validate_json(message.content[-1].text)
messages.append({"role": "user", "content": notes.THANKS})
tools = [tool.to_dict() for tool in asked.pop("tools")]
last: Any = client.messages.create(**asked, tools=tools, messages=messages)
notes.tell(city, last.content[-1].text)
