"""The examples of Anthropic's documentation of tools, thinking, citations and caching.

Each is told in our own words and as short as it can be, with every field that the guides show.
"""

from typing import Any

from tests.tieredkv.documented_openai import Example, Json, schema, user


def turns(*blocks: Json, answer: Any = (), **fields: Any) -> Json:
    """Return a body in which the model wrote these blocks, and the user answered with others."""
    made = [user("Go on.")]
    if blocks:
        made.append({"role": "assistant", "content": [*blocks]})
        made.append({"role": "user", "content": [*answer] or "Further."})
    return {"max_tokens": 9, "messages": made, **fields}


def says(*blocks: Any, **fields: Any) -> Json:
    """Return a body with one turn of the user."""
    return {"max_tokens": 9, "messages": [{"role": "user", "content": [*blocks]}], **fields}


def text(words: str, *citations: Json, **fields: Any) -> Json:
    cited = {"citations": [*citations]} if citations else {}
    return {"type": "text", "text": words, **cited, **fields}


def result(content: Any, id: str = "toolu_1", **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def ran(kind: str, content: Any) -> Json:
    """Return the block with what a tool of Anthropic's servers made."""
    return {"type": f"{kind}_tool_result", "tool_use_id": "srvtoolu_1", "content": content}


def runs(name: str, **given: Any) -> Json:
    """Return the block with which a tool of Anthropic's servers was called."""
    return {"type": "server_tool_use", "id": "srvtoolu_1", "name": name, "input": given}


EPHEMERAL: Json = {"type": "ephemeral"}
WEATHER: Json = {"name": "get_weather", "description": "Tells the weather of a place.",
                 "input_schema": schema(location="string")}  # fmt: skip
USE: Json = {"type": "tool_use", "id": "toolu_1", "name": "get_weather",
             "input": {"location": "Bern"}}  # fmt: skip
PICTURE: Json = {"type": "image", "source": {
    "type": "base64", "media_type": "image/png", "data": "aGk="}}  # fmt: skip
NOTES: Json = {"type": "document", "title": "Notes", "context": "Of May.",
               "citations": {"enabled": True}, "source": {
                   "type": "text", "media_type": "text/plain", "data": "It rained."}}  # fmt: skip
FOUND: Json = {"type": "search_result", "source": "https://a.ch", "title": "Rain",
               "content": [text("It rains."), text("A lot.")],
               "citations": {"enabled": True}}  # fmt: skip
THOUGHT: Json = {"type": "thinking", "thinking": "Hm.", "signature": "EqQB"}
CODE_CALLER = {"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}

# fmt: off
TOOLS = [
    Example("tools: a call is wanted", turns(tools=[WEATHER]),
            ("get_weather", "Tells the weather of a place.")),
    Example("tools: the result of a call",
            turns(text("Let me see."), USE, answer=[result("14 degrees")], tools=[WEATHER]),
            ("Let me see.", '"location": "Bern"', "14 degrees")),
    Example("tools: results of several calls, and a text", turns(
        USE, {**USE, "id": "toolu_2", "input": {"location": "Rome"}},
        answer=[result("14"), result("cold", "toolu_2"), text("And now?")], tools=[WEATHER]),
        ('"Bern"', '"Rome"', "14", "cold", "And now?")),
    Example("tools: a result in parts", turns(
        USE, answer=[result([text("Look:"), PICTURE, NOTES])], tools=[WEATHER]),
        ("Look:\n[An image was here.", "Notes\nOf May.\nIt rained.")),
    Example("tools: a call has failed", turns(
        USE, answer=[result("ConnectionError", is_error=True)], tools=[WEATHER]),
        ("[The tool has failed.]\nConnectionError",)),
    Example("tools: a call has failed without a word", turns(
        USE, answer=[{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}],
        tools=[WEATHER]), ("[The tool has failed.]",)),
    Example("tools: a result without content", turns(
        USE, answer=[{"type": "tool_result", "tool_use_id": "toolu_1"}], tools=[WEATHER])),
    Example("tools: one is forced", turns(tools=[WEATHER], tool_choice={
        "type": "tool", "name": "get_weather", "disable_parallel_tool_use": True})),
    Example("tools: one at least", turns(tools=[WEATHER], tool_choice={"type": "any"})),
    Example("tools: none", turns(tools=[WEATHER], tool_choice={"type": "none"})),
    Example("tools: strict, with examples, and input in pieces", turns(tools=[
        {**WEATHER, "type": "custom", "strict": True, "eager_input_streaming": True,
         "input_examples": [{"location": "Bern"}], "cache_control": EPHEMERAL}]),
        (r'Example: {\"location\": \"Bern\"}',)),
    Example("bash", turns(
        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}},
        answer=[result("a.py")], tools=[{"type": "bash_20250124", "name": "bash"}]),
        ('"command": "ls"', "a.py")),
    Example("the text editor", turns(
        {"type": "tool_use", "id": "toolu_1", "name": "str_replace_based_edit_tool", "input": {
            "command": "view", "path": "a.py", "view_range": [1, 2]}},
        answer=[result("1: pass")], tools=[
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool",
             "max_characters": 10000}]), ("str_replace_based_edit_tool", "a.py", "1: pass")),
    Example("memory", turns(
        {"type": "tool_use", "id": "toolu_1", "name": "memory", "input": {
            "command": "view", "path": "/memories"}},
        answer=[result("notes.md")], tools=[{"type": "memory_20250818", "name": "memory"}]),
        ("/memories", "notes.md")),
    Example("computer use", turns(
        {"type": "tool_use", "id": "toolu_1", "name": "computer", "input": {
            "action": "screenshot"}}, answer=[result([PICTURE])], tools=[
            {"type": "computer_20251124", "name": "computer", "display_width_px": 1024,
             "display_height_px": 768, "display_number": 1, "enable_zoom": True},
            {"type": "bash_20250124", "name": "bash"}]),
        ('"action": "screenshot"', "[An image was here.", "bash"), ("computer_20251124",)),
    Example("a browser", turns(
        {**USE, "name": "navigate"}, tools=[{"type": "browser_toolset_20260801"}],
        answer=[result([text("Done."), {"type": "browser_state", "tabs": [
            {"tab_id": 1, "url": "https://a.ch", "title": "Rain", "active": True}]}],
            toolset_name="browser")]),
        ("Done.", '"url":"https://a.ch","title":"Rain"'), ("browser_toolset_20260801",)),
]

SERVERS = [
    Example("web search", turns(tools=[
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5,
         "allowed_domains": ["a.ch"], "user_location": {
             "type": "approximate", "city": "Bern", "timezone": "Europe/Zurich"}}]),
        (), ("web_search_20250305",)),
    Example("one at least, and all are hosted", turns(
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "any"}), (), ("web_search_20250305",)),
    Example("web search has found something", turns(
        text("I will search."), runs("web_search", query="rain"),
        ran("web_search", [{"type": "web_search_result", "url": "https://a.ch", "title": "Rain",
                            "encrypted_content": "EqgfC", "page_age": "May 1"}]),
        text("It rains.", {"type": "web_search_result_location", "url": "https://a.ch",
                           "title": "Rain", "encrypted_index": "Eo8B", "cited_text": "It"})),
        ("I will search.", '"input":{"query":"rain"}', '"page_age":"May 1"', "It rains.")),
    Example("web search has failed", turns(
        runs("web_search", query="rain"),
        ran("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"})),
        ('"error_code":"unavailable"',)),
    Example("web fetch", turns(
        runs("web_fetch", url="https://a.ch"),
        ran("web_fetch", {"type": "web_fetch_result", "url": "https://a.ch", "content": NOTES,
                          "retrieved_at": "2026-05-01"}),
        tools=[{"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 1,
                "citations": {"enabled": True}, "max_content_tokens": 1000}]),
        ("https://a.ch", '"data":"It rained."'), ("web_fetch_20250910",)),
    Example("code execution", turns(
        runs("bash_code_execution", command="ls"),
        ran("bash_code_execution", {
            "type": "bash_code_execution_result", "stdout": "a.py", "stderr": "", "return_code": 0,
            "content": [{"type": "bash_code_execution_output", "file_id": "file_1"}]}),
        runs("text_editor_code_execution", command="view", path="a.py"),
        ran("text_editor_code_execution", {
            "type": "text_editor_code_execution_view_result", "file_type": "text",
            "content": "pass", "num_lines": 1, "start_line": 1, "total_lines": 1}),
        tools=[{"type": "code_execution_20250825", "name": "code_execution"}],
        container="container_1"),
        ('"command":"ls"', '"stdout":"a.py"', '"content":"pass"'), ("code_execution_20250825",)),
    Example("a file for the container", says(
        text("Read it."), {"type": "container_upload", "file_id": "file_1"}),
        ("Read it.\n[container_upload]",)),
    Example("programs that call tools", turns(
        runs("code_execution", code="await look()"), {**USE, "caller": CODE_CALLER},
        answer=[result("14 degrees")], tools=[
            {"type": "code_execution_20260120", "name": "code_execution"},
            {**WEATHER, "allowed_callers": ["code_execution_20260120"]}]),
        ("await look()", '"location": "Bern"', "14 degrees"), ("code_execution_20260120",)),
    Example("tool search", turns(
        runs("tool_search_tool_regex", query="weather"),
        ran("tool_search", {"type": "tool_search_tool_search_result", "tool_references": [
            {"type": "tool_reference", "tool_name": "get_weather"}]}), USE,
        answer=[result("14 degrees")], tools=[
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
            {**WEATHER, "defer_loading": True}]),
        ('"query":"weather"', '"tool_name":"get_weather"', "14 degrees"),
        ("tool_search_tool_bm25_20251119", "tool_search_tool_regex_20251119")),
    Example("tool search by the client", turns(
        {**USE, "name": "find"}, tools=[{**WEATHER, "name": "find"}, WEATHER],
        answer=[result([{"type": "tool_reference", "tool_name": "get_weather"}])]),
        ('[tool_reference] {"tool_name":"get_weather"}',)),
    Example("MCP servers", turns(
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "roll", "server_name": "dice",
         "input": {"n": 2}},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False,
         "content": [text("seven")]},
        mcp_servers=[{"type": "url", "url": "https://a.ch/sse", "name": "dice",
                      "authorization_token": "t"}],
        tools=[{"type": "mcp_toolset", "mcp_server_name": "dice", "configs": {
            "roll": {"enabled": True, "defer_loading": True}}}]),
        ('"input":{"n":2}', '"text":"seven"'), ("mcp_toolset",)),
    Example("skills", turns(
        tools=[{"type": "code_execution_20250825", "name": "code_execution"}],
        container={"skills": [{"type": "anthropic", "skill_id": "xlsx", "version": "latest"}]}),
        (), ("code_execution_20250825",)),
    Example("an advisor", turns(
        runs("advisor"), ran("advisor", {"type": "advisor_result", "text": "Test it."}),
        tools=[{"type": "advisor_20260301", "name": "advisor", "model": "a", "max_uses": 2}]),
        ("Test it.",), ("advisor_20260301",)),
]

OTHERS = [
    Example("thinking with a tool", turns(
        THOUGHT, text("Let me see."), USE, answer=[result("14 degrees")], tools=[WEATHER],
        max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024}),
        ("Let me see.", "14 degrees")),
    Example("hidden thoughts", turns(
        {"type": "redacted_thinking", "data": "EmwKAhgB"}, text("It is."),
        thinking={"type": "adaptive", "display": "omitted"}), ("It is.",)),
    Example("structured outputs", turns(output_config={
        "format": {"type": "json_schema", "schema": schema(name="string")}, "effort": "medium"})),
    Example("structured outputs, the older field", turns(
        output_format={"type": "json_schema", "schema": schema(name="string")})),
    Example("citations of documents", turns(
        text("It rained.", {"type": "char_location", "cited_text": "It rained.",
                            "document_index": 0, "document_title": "Notes", "start_char_index": 0,
                            "end_char_index": 10}), text(" Often.")), ("It rained.", "Often.")),
    Example("documents of all kinds", says(
        NOTES, {**NOTES, "source": {"type": "content", "content": [text("Wet."), text("Dry.")]}},
        {"type": "document", "source": {"type": "url", "url": "https://a.ch/b.pdf"}},
        {"type": "document", "source": {"type": "file", "file_id": "file_1"}}, text("Sum up.")),
        ("Of May.\nIt rained.", "Wet.\nDry.", "[A document was here.", "Sum up.")),
    Example("search results of the client", says(FOUND, text("Where?")),
            ("Rain\nhttps://a.ch\nIt rains.\nA lot.\nWhere?",)),
    Example("search results of a tool", turns(
        USE, answer=[result([{**FOUND, "cache_control": EPHEMERAL}])], tools=[WEATHER]),
        ("Rain\nhttps://a.ch\nIt rains.\nA lot.",)),
    Example("context editing", turns(
        USE, answer=[result("14 degrees")], tools=[WEATHER], context_management={"edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
            {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3},
             "trigger": {"type": "input_tokens", "value": 30000}, "clear_tool_inputs": True,
             "clear_at_least": {"type": "input_tokens", "value": 500}, "exclude_tools": ["a"]}]}),
        ("14 degrees",)),
    Example("compaction", turns(
        {"type": "compaction", "content": "They spoke of rain."}, context_management={
            "edits": [{"type": "compact_20260112", "trigger": {
                "type": "input_tokens", "value": 150000}, "pause_after_compaction": True}]}),
        ("They spoke of rain.",)),
    Example("caching: system and tools", turns(
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        system=[text("Be brief."), text("A long book.", cache_control=EPHEMERAL)]),
        ("Be brief.\nA long book.",)),
    Example("caching: the whole conversation", turns(
        text("Hello."), cache_control=EPHEMERAL, system="Be brief."), ("Be brief.", "Hello.")),
    Example("tools that come and go", {"max_tokens": 9, "messages": [
        user("Go on."), {"role": "system", "clear_at": "never", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "get_weather"}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "find"}}]},
        user("Further.")], "tools": [WEATHER]},
        ('[tool_addition] {"tool":{"type":"tool_reference","name":"get_weather"}}',)),
]
MESSAGES = [*TOOLS, *SERVERS, *OTHERS]
# fmt: on
