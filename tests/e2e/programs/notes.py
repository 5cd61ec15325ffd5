"""The task of the programs in Python: read a note, write another one, and answer with a city."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

URL = os.environ.get("TIEREDKV_URL", "")  # with /v1
ROOT = URL.removesuffix("/v1")
MODEL = "scripted"
SYSTEM = "You keep notes of cities, and you read and write them with your tools only. " * 12
THANKS = "Thank you."


class City(BaseModel):
    """A city of a note."""

    name: str
    population: int


def task(script: str) -> str:
    """Return the message of the user that has the model follow a script."""
    where = f"Please follow script {script}. Without tools, follow script city."
    return f"Read the note `todo` and do what it says. {where}"


def read_note(title: str) -> str:
    """Read a note.

    Args:
        title: Title of the note.
    """
    return Path(f"{title}.txt").read_text(encoding="utf-8")


def write_note(title: str, text: str) -> str:
    """Write a note.

    Args:
        title: Title of the note.
        text: The whole text of the note.
    """
    Path(f"{title}.txt").write_text(text, encoding="utf-8")
    return f"The note `{title}` has {len(text)} characters now."


def run_call(name: str, arguments: str | dict[str, Any]) -> str:
    """Run a call of one of the tools, for programs that leave that to their users."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return read_note(**given) if name == "read_note" else write_note(**given)


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    fields = ["title"] if name == "read_note" else ["title", "text"]
    return {
        "type": "object",
        "properties": {field: {"type": "string"} for field in fields},
        "required": fields,
        "additionalProperties": False,
    }


CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema_of(name)}}
    for name in ("read_note", "write_note")
]


STRICT_TOOLS: list[Any] = [
    {"type": "function", "function": {**tool["function"], "strict": True}} for tool in CHAT_TOOLS
]


def tell(city: City | None, text: str = "") -> None:
    """Print the outcome, which the test reads."""
    print(json.dumps({"city": city and city.model_dump(), "text": text}))  # noqa: T201
