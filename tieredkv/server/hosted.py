"""What stands in a prompt for a part of a conversation that only a provider's servers can serve.

A conversation that began elsewhere brings searches, runs of code and calls of MCP servers, with
what came of them. A model here is told of each in a short text: its type, and as JSON whatever of
it a model can read. The same part always becomes the same text, so that it is found in the cache.
"""

from typing import Any, Literal, get_args

import msgspec

from tieredkv.fields import names_of

ItemType = Literal[
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
]
"""Types of items of OpenAI's Responses."""

BlockType = Literal[
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "browser_state",
    "code_execution_tool_result",
    "compaction",
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_result",
    "mcp_tool_use",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_addition",
    "tool_reference",
    "tool_removal",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
]
"""Types of blocks of Anthropic's Messages."""

_UNREADABLE = names_of("""
    acknowledged_safety_checks approval_request_id cache_control call_id caller citations
    container_id encrypted_content encrypted_index encrypted_stdout file_data file_id fingerprint id
    image_url input_audio logprobs pending_safety_checks signature tool_use_id
""")
"""Names of fields that tell a model nothing: ids, pictures and files, and what is encrypted."""

_BASE64 = {"image_generation_call": "result", "base64": "data"}
"""Fields that hold data instead of text, by the types of objects."""


def readable(value: Any) -> str:
    """Return what a model can read of a JSON value, as JSON."""
    return msgspec.json.encode(_readable(value)).decode()


def note(part: dict[str, Any]) -> str:
    """Return the text that stands in the prompt for an item or a block."""
    kind = part["type"]
    told = _readable({key: value for key, value in part.items() if key != "type"}, kind)
    return f"[{kind}] {msgspec.json.encode(told).decode()}" if told else f"[{kind}]"


def told_in_text(value: Any) -> Any:
    """Return a block of Anthropic's as a text if it is a search result, or of its own servers."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "search_result" and isinstance(value.get("content"), list):
        texts = [each.get("text") for each in value["content"] if isinstance(each, dict)]
        told = [value.get("title"), value.get("source"), *texts]
        text = "\n".join(each for each in told if isinstance(each, str))
    elif kind in get_args(BlockType):
        text = note(value)
    else:
        return value
    return {"type": "text", "text": text, "cache_control": value.get("cache_control")}


def _readable(value: Any, kind: object = None) -> Any:
    """Return what a model can read of a JSON value; it is empty if there is nothing."""
    if isinstance(value, list):
        return [made for made in map(_readable, value) if made not in _NOTHING]
    if not isinstance(value, dict):
        return value
    kind = value.get("type", kind)
    unread = {*_UNREADABLE, _BASE64.get(kind, "") if isinstance(kind, str) else ""}
    made = {key: _readable(each) for key, each in value.items() if key not in unread}
    return {
        key: each
        for key, each in made.items()
        if each not in _NOTHING and (key, each) != ("status", "completed")
    }


_NOTHING: tuple[object, ...] = (None, "", [], {})
