"""The task with langgraph and langchain-openai: `langgraph_agent METHOD`."""

import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from tests.e2e.programs import notes

how: Any = {"base_url": notes.URL, "api_key": "any", "max_retries": 0}
model = ChatOpenAI(model=notes.MODEL, **how)
agent: Any = create_react_agent(model, [notes.read_note, notes.write_note], prompt=notes.SYSTEM)
messages: list[Any] = [("user", notes.task("notes"))]
messages = agent.invoke({"messages": messages})["messages"]
method: Any = sys.argv[1]
typed = model.with_structured_output(notes.City, method=method)
if method == "function_calling":
    messages[0].content = notes.task("notes-city")
    messages = messages[:-1]  # its step is the last answer's
outcome: Any = typed.invoke([("system", f"{notes.SYSTEM} Answer with JSON."), *messages])
notes.tell(outcome)
