"""The task with OpenAI's package: `openai_sdk chat|stream|responses|parse`."""

import sys
from typing import Any

import openai

from tests.e2e.programs import notes

client = openai.OpenAI(base_url=notes.URL, api_key="any", max_retries=0)


def chat() -> tuple[notes.City | None, str]:
    """Call tools, then answer with JSON, then with text."""
    messages: list[Any] = [
        {"role": "system", "content": notes.SYSTEM},
        {"role": "user", "content": notes.task("notes")},
    ]
    city, text = None, ""
    for _ in range(4):
        asked: dict[str, Any] = {"model": notes.MODEL, "messages": messages}
        asked["tools"] = notes.STRICT_TOOLS if sys.argv[1] == "parse" else notes.CHAT_TOOLS
        if sys.argv[1] == "stream":
            with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        elif sys.argv[1] == "parse" and len(messages) == 6:
            answer: Any = client.chat.completions.parse(**asked, response_format=notes.City)
            message = answer.choices[0].message
            assert message.parsed is not None
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.to_dict())
        for call in message.tool_calls or ():
            result = notes.run_call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            city, text = city or notes.City.model_validate_json(message.content), message.content
            messages.append({"role": "user", "content": notes.THANKS})
    return city, text


def responses() -> tuple[notes.City | None, str]:
    """Do the same with the Responses API."""
    items: list[Any] = [{"role": "user", "content": notes.task("notes")}]
    tools: Any = [
        {"type": "function", "strict": False, **tool["function"]} for tool in notes.CHAT_TOOLS
    ]
    city, text = None, ""
    for _ in range(4):
        answer = client.responses.create(
            model=notes.MODEL, instructions=notes.SYSTEM, input=items, tools=tools, store=False
        )
        items += [item.to_dict() for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            output = notes.run_call(call.name, call.arguments)
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )
        if not calls:
            text = answer.output_text
            city = city or notes.City.model_validate_json(text)
            items.append({"role": "user", "content": notes.THANKS})
    return city, text


notes.tell(*(responses() if sys.argv[1] == "responses" else chat()))
