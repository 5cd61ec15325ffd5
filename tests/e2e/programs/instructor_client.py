"""The task with instructor, which asks for the last answer: `instructor_client MODE`."""

import sys
from typing import Any

import instructor
import openai

from tests.e2e.programs import notes

plain = openai.OpenAI(base_url=notes.URL, api_key="any", max_retries=0)
messages: list[Any] = [
    {"role": "system", "content": notes.SYSTEM},
    {"role": "user", "content": notes.task("notes-city")},
]
for _ in range(2):
    answer: Any = plain.chat.completions.create(
        model=notes.MODEL, messages=messages, tools=notes.CHAT_TOOLS
    )
    message = answer.choices[0].message
    messages.append(message.to_dict())
    for call in message.tool_calls:
        result = notes.run_call(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
client: Any = instructor.from_openai(plain, mode=instructor.Mode[sys.argv[1]])
ask = client.chat.completions.create
notes.tell(ask(model=notes.MODEL, messages=messages, response_model=notes.City, max_retries=0))
