"""The task with litellm: `litellm_client openai|anthropic[-typed]`."""

import sys
from typing import Any

import litellm

from tests.e2e.programs import notes

provider, is_typed = sys.argv[1].split("-")[0], sys.argv[1].endswith("-typed")
asked: dict[str, Any] = {"model": f"{provider}/{notes.MODEL}", "api_key": "any"}
asked |= {"api_base": notes.ROOT if provider == "anthropic" else notes.URL, "max_tokens": 500}
if provider == "anthropic":  # without marks, only what others have marked is found
    asked["cache_control_injection_points"] = [{"location": "message", "index": -1}]
messages: list[Any] = [
    {"role": "system", "content": notes.SYSTEM},
    {"role": "user", "content": notes.task("notes")},
]
for _ in range(3):
    more = {"response_format": notes.City} if is_typed and len(messages) > 4 else {}
    answer: Any = litellm.completion(**asked, messages=messages, tools=notes.CHAT_TOOLS, **more)
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = notes.run_call(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
notes.tell(notes.City.model_validate_json(message.content))
