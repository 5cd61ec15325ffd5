"""What stands in a prompt for a part of a conversation that has no other form for the model.

A conversation that began elsewhere brings searches, runs of code and calls of MCP servers, with
what came of them. A model here is told of each in a short text: its type, and as JSON whatever of
it a model can read. The same part always becomes the same text, so that it is found in the cache.
So does a part of a type that this server does not know.
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

ITEM_TYPES = frozenset(get_args(ItemType))
BLOCK_TYPES = frozenset({*get_args(BlockType), "search_result"})

_UNREADABLE = names_of("""
    acknowledged_safety_checks approval_request_id cache_control call_id caller citations
    container_id encrypted_content encrypted_index encrypted_stdout file_data file_id fingerprint id
    image_url input_audio logprobs pending_safety_checks prompt_cache_breakpoint signature
    tool_use_id
""")
"""Names of fields that tell a model nothing: ids, pictures and files, and what is encrypted."""

MAX_UNKNOWN_BYTES = 4096
"""The longest note of a part whose type is not known."""

_BASE64 = {"image_generation_call": "result", "base64": "data"}
"""Fields that hold data instead of text, by the types of objects."""


class Note(str):
    """A text that stands for a part of a conversation; special tokens in it are always text."""

    __slots__ = ()


def readable(value: Any) -> str:
    """Return what a model can read of a JSON value, as JSON."""
    return msgspec.json.encode(_readable(value)).decode()


def note(part: dict[str, Any]) -> Note:
    """Return the text that stands in the prompt for an item or a block.

    Where its type is not known, the keys of its JSON are sorted, and the text is cut.
    """
    kind = part["type"]
    told = _readable({key: value for key, value in part.items() if key != "type"}, kind)
    is_known = kind in ITEM_TYPES or kind in BLOCK_TYPES
    written = msgspec.json.encode(told, order=None if is_known else "sorted").decode()
    text = f"[{kind}] {written}" if told else f"[{kind}]"
    return Note(text if is_known else text.encode()[:MAX_UNKNOWN_BYTES].decode(errors="ignore"))


def block_note(block: dict[str, Any]) -> Note:
    """Return the text that stands for a block of Anthropic's that is none of the client's own."""
    if block["type"] == "search_result" and isinstance(block.get("content"), list):
        texts = [each.get("text") for each in block["content"] if isinstance(each, dict)]
        told = [block.get("title"), block.get("source"), *texts]
        return Note("\n".join(each for each in told if isinstance(each, str)))
    return note(block)


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
