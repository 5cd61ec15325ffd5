"""A checkpoint's own templates, and arguments for them, take effect in a real server."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import golden, http
from tests.engine.conftest import write_checkpoint
from tests.serving import Server, running
from tests.tieredkv.test_response_templates import JSON_CALLS

RUN, CHAT = "tieredkv.server.run", "tieredkv.server.chat"
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('A system message comes first') }}{% endif %}{{ mood }}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}
{%- endfor %}"""


def checkpoint(folder: Path, response_template: Any) -> str:
    """Write a checkpoint with these templates and return its folder."""
    write_checkpoint(folder, "llama")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"response_template": response_template}
    file.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def prompt(server: Server, messages: list[Any], **fields: Any) -> str:
    body = {"messages": messages, **fields}
    token_ids = http.post(f"{server.root}/tokenize", json=body).json()["tokens"]
    told = http.post(f"{server.root}/detokenize", json={"tokens": token_ids}).json()
    text: str = told["prompt"]
    return text


def test_templates_of_a_checkpoint_are_used_and_told(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", JSON_CALLS)
    flags = ("--chat-template-kwargs", '{"mood": "calm ", "nosuch": true}')
    with running(tmp_path, *flags, model=model) as server:
        [told] = http.get(f"{server.url}/models").json()["data"]
        assert told["tool_parser"] == "response_template"
        golden.told("\n".join(server.said("INFO", RUN)))
        golden.told("\n".join(server.said("INFO", CHAT)))
        golden.told("\n".join(server.said("WARNING", CHAT)))
        function = {"name": "now", "arguments": '{"é":1}'}
        call = {"id": "a", "type": "function", "function": function}
        messages: list[Any] = [
            {"role": "user", "content": "asked"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "told"},
            {"role": "system", "content": "late"},
        ]
        assert prompt(server, messages) == 'calm askedcalm now{"é": 1}calm toldcalm late'
        own = prompt(server, messages[:1], chat_template_kwargs={"mood": "wild "})
        assert own == "wild asked"


@pytest.mark.slow
def test_a_response_template_of_no_use_is_told_and_hurts_nothing(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "x")
    with running(tmp_path, model=model) as server:
        [told] = http.get(f"{server.url}/models").json()["data"]
        assert told["tool_parser"] is None
        golden.told("\n".join(server.said("WARNING", "tieredkv.server.message_parser")))
        golden.told("\n".join(server.said("INFO", RUN)))
