"""The examples of OpenAI's documentation of tools, structured outputs, reasoning and state.

Each is told in our own words and as short as it can be, with every field that the guides show.
"""

from typing import Any, NamedTuple

Json = dict[str, Any]


class Example(NamedTuple):
    """A request as a guide shows it.

    Attributes:
        name: of the guide, and what of it.
        body: of the request, without its model.
        told: texts that stand in the prompt.
        left_out: the types of tools that the answer names as left out.
    """

    name: str
    body: Json
    told: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def asks(*items: Json, says: str = "Go on.", **fields: Any) -> Json:
    """Return a body whose input ends with these items, behind a message of the user."""
    return {"input": [user(says), *items], **fields}


def message(text: str, *annotations: Json) -> Json:
    """Return a message of the model as it came in an answer."""
    part = {"type": "output_text", "text": text, "annotations": [*annotations], "logprobs": []}
    head = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    return {**head, "content": [part]}


def schema(**properties: Any) -> Json:
    made = {name: {"type": kind} if isinstance(kind, str) else kind
            for name, kind in properties.items()}  # fmt: skip
    names = [*properties]
    return {"type": "object", "properties": made, "required": names, "additionalProperties": False}


WEATHER: Json = {
    "type": "function", "name": "get_weather", "description": "Tells the weather of a place.",
    "parameters": schema(location="string", units={"type": "string", "enum": ["C", "K"]}),
    "strict": True,
}  # fmt: skip
CALL: Json = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather",
              "arguments": '{"location":"Bern"}', "status": "completed"}  # fmt: skip
RESULT: Json = {"type": "function_call_output", "call_id": "call_1", "output": '{"degrees": 14}'}
DIRECT, PROGRAM = {"type": "direct"}, {"type": "program", "caller_id": "call_p"}
EVENT = schema(name="string", date="string", people={"type": "array", "items": {"type": "string"}})
SEARCH: Json = {"type": "web_search"}
MCP: Json = {"type": "mcp", "server_label": "dice", "server_url": "https://example.com/sse",
             "server_description": "Rolls dice.", "require_approval": "never"}  # fmt: skip
PICTURE = "data:image/png;base64,aGk="
SKILL: Json = {"name": "csv", "description": "Reads tables.", "path": "/skills/csv"}
INLINE: Json = {"type": "inline", "name": "csv", "description": "Reads tables.", "source": {
    "type": "base64", "media_type": "application/zip", "data": "UEsDBA=="}}  # fmt: skip

# fmt: off
FUNCTIONS = [
    Example("functions: a call is wanted", asks(says="How is Bern?", tools=[WEATHER]),
            ("How is Bern?", "get_weather", "Tells the weather of a place.")),
    Example("functions: the result of a call", asks(CALL, RESULT, tools=[WEATHER]),
            ('"location": "Bern"', '{"degrees": 14}')),
    Example("functions: results of several calls",
            asks(CALL, {**CALL, "call_id": "call_2", "arguments": '{"location":"Rome"}'}, RESULT,
                 {**RESULT, "call_id": "call_2", "output": "warm"}, tools=[WEATHER]),
            ('"Bern"', '"Rome"', '{"degrees": 14}', "warm")),
    Example("functions: a result in parts",
            asks(CALL, {**RESULT, "output": [{"type": "input_text", "text": "Rain."},
                 {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
                 {"type": "input_file", "file_id": "file_1"}]}, tools=[WEATHER]),
            ("Rain.", "[An image was here.", "[A document was here.")),
    Example("functions: one is forced",
            asks(tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})),
    Example("functions: one at least", asks(tools=[WEATHER], tool_choice="required")),
    Example("functions: none, and not several",
            asks(tools=[WEATHER], tool_choice="none", parallel_tool_calls=False)),
    Example("functions: some are allowed, hosted ones among them",
            asks(tools=[WEATHER, MCP, {"type": "image_generation"}],
                 tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [
                     {"type": "function", "name": "get_weather"},
                     {"type": "mcp", "server_label": "dice"}, {"type": "image_generation"}]}),
            ("get_weather",), ("image_generation", "mcp")),
    Example("functions: only hosted ones are allowed",
            asks(tools=[WEATHER, SEARCH], tool_choice={
                "type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}),
            ("get_weather",), ("web_search",)),
    Example("custom tools: a text", asks(
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_1", "name": "code_exec",
         "input": "print(1)"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "1"},
        tools=[{"type": "custom", "name": "code_exec", "description": "Runs Python."}]),
        ("Runs Python.", '"input": "print(1)"', "\n1<")),
    Example("custom tools: a grammar in Lark", asks(tools=[
        {"type": "custom", "name": "sum", "description": "Adds.", "format": {
            "type": "grammar", "syntax": "lark", "definition": 'start: INT "+" INT'}}],
        tool_choice={"type": "custom", "name": "sum"}), ("lark grammar", "start: INT")),
    Example("custom tools: a regular expression", asks(tools=[
        {"type": "custom", "name": "at", "format": {
            "type": "grammar", "syntax": "regex", "definition": "[0-9]{2}:[0-9]{2}"}}]),
        ("[0-9]{2}:[0-9]{2}",)),
    Example("tool search: deferred functions in a namespace", asks(tools=[
        {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [
            {**WEATHER, "name": "list_orders", "defer_loading": True}]}, {"type": "tool_search"}]),
        ("crm__list_orders",), ("tool_search",)),
    Example("tool search: done by the client", asks(
        {"type": "tool_search_call", "call_id": "call_s", "execution": "client",
         "arguments": {"goal": "ship it"}, "status": "completed"},
        {"type": "tool_search_output", "call_id": "call_s", "execution": "client",
         "tools": [{**WEATHER, "name": "ship", "defer_loading": True}], "status": "completed"},
        tools=[{"type": "tool_search", "execution": "client", "description": "Finds tools.",
                "parameters": schema(goal="string")}]),
        ('{"goal": "ship it"}', '{"name":"ship"', "Finds tools.")),
    Example("programs that call tools", asks(
        {"type": "program", "id": "prog_1", "call_id": "call_p", "code": "await look()",
         "fingerprint": "f"},
        {**CALL, "caller": PROGRAM}, {**RESULT, "caller": PROGRAM},
        {"type": "program_output", "id": "po_1", "call_id": "call_p", "result": "14",
         "status": "completed"},
        tools=[{**WEATHER, "allowed_callers": ["programmatic"], "output_schema": schema()},
               {"type": "programmatic_tool_calling"}]),
        ("await look()", "14", "get_weather"), ("programmatic_tool_calling",)),
    Example("tools that come later", asks(
        {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}), ("get_weather",)),
    Example("another effort from here on", asks(
        {"type": "configuration_update", "reasoning": {"effort": "low"}})),
]

HOSTED = [
    Example("web search", asks(tools=[
        {"type": "web_search", "search_context_size": "low", "external_web_access": False,
         "filters": {"allowed_domains": ["example.com"]},
         "user_location": {"type": "approximate", "country": "CH", "city": "Bern"}}],
        include=["web_search_call.action.sources"], tool_choice="auto"), (), ("web_search",)),
    Example("web search has found something", asks(
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {
            "type": "search", "query": "rain", "sources": [{"type": "url", "url": "https://a.ch"}]}},
        {"type": "web_search_call", "id": "ws_2", "status": "completed",
         "action": {"type": "open_page", "url": "https://a.ch"}},
        {"type": "web_search_call", "id": "ws_3", "status": "completed",
         "action": {"type": "find_in_page", "url": "https://a.ch", "pattern": "Bern"}},
        message("It rains.", {"type": "url_citation", "start_index": 0, "end_index": 2,
                              "url": "https://a.ch", "title": "Rain"}), user("Where?"),
        tools=[SEARCH]), ('"query":"rain"', "open_page", '"pattern":"Bern"', "It rains."),
        ("web_search",)),
    Example("file search", asks(
        {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["rain"],
         "results": [{"file_id": "f", "filename": "a.md", "text": "Wet.", "score": 0.5,
                      "attributes": {"year": 2026}}]},
        message("Wet.", {"type": "file_citation", "index": 1, "file_id": "f", "filename": "a.md"}),
        user("When?"), include=["file_search_call.results"], tools=[
            {"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 2,
             "filters": {"type": "eq", "key": "year", "value": 2026},
             "ranking_options": {"ranker": "auto", "score_threshold": 0.5}}]),
        ('"queries":["rain"]', '"text":"Wet."', '"year":2026'), ("file_search",)),
    Example("code interpreter must be used", asks(tool_choice="required", tools=[
        {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "4g"}}]),
        (), ("code_interpreter",)),
    Example("code interpreter has run", asks(
        {"type": "code_interpreter_call", "id": "ci_1", "container_id": "cntr_1", "code": "6*7",
         "status": "completed", "outputs": [{"type": "logs", "logs": "42"},
                                            {"type": "image", "url": "https://a/b.png"}]},
        message("It is 42.", {"type": "container_file_citation", "container_id": "cntr_1",
                              "start_index": 0, "end_index": 2, "file_id": "f", "filename": "a"}),
        user("Sure?"), tools=[{"type": "code_interpreter", "container": "cntr_1"}],
        include=["code_interpreter_call.outputs"]),
        ('"code":"6*7"', '"logs":"42"', "It is 42."), ("code_interpreter",)),
    Example("computer use, the preview", asks(
        {"type": "computer_call", "id": "cu_1", "call_id": "call_c", "status": "completed",
         "action": {"type": "click", "button": "left", "x": 156, "y": 50},
         "pending_safety_checks": [{"id": "sc_1", "code": "malicious_instructions"}]},
        {"type": "computer_call_output", "call_id": "call_c",
         "acknowledged_safety_checks": [{"id": "sc_1", "code": "malicious_instructions"}],
         "output": {"type": "computer_screenshot", "image_url": PICTURE},
         "current_url": "https://example.com/now"},
        tools=[{"type": "computer_use_preview", "display_width": 1024, "display_height": 768,
                "environment": "browser"}], truncation="auto", reasoning={"summary": "concise"}),
        ('"x":156', "https://example.com/now"), ("computer_use_preview",)),
    Example("computer use, with several actions", asks(
        {"type": "computer_call", "id": "cu_1", "call_id": "call_c", "status": "completed",
         "pending_safety_checks": [], "actions": [{"type": "type", "text": "penguin"},
                                                  {"type": "keypress", "keys": ["ENTER"]}]},
        {"type": "computer_call_output", "call_id": "call_c", "output": {
            "type": "computer_screenshot", "file_id": "file_1"}},
        tools=[{"type": "computer"}]), ("penguin", "ENTER", "computer_screenshot"), ("computer",)),
    Example("image generation", asks(
        {"type": "image_generation_call", "id": "ig_1", "status": "completed",
         "result": "aGk=", "revised_prompt": "A tall cat."}, user("Now small."),
        tools=[{"type": "image_generation", "partial_images": 2, "quality": "low",
                "input_image_mask": {"file_id": "f"}}]), ("A tall cat.",), ("image_generation",)),
    Example("an MCP server", asks(
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "dice", "tools": [
            {"name": "roll", "description": "Rolls.", "input_schema": schema(dice="string"),
             "annotations": {"read_only": False}}]},
        {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "dice", "name": "roll",
         "arguments": '{"dice":"2d4"}'},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "dice", "name": "roll",
         "arguments": '{"dice":"2d4"}', "approval_request_id": "mcpr_1", "output": "seven"},
        tools=[{**MCP, "require_approval": {"never": {"tool_names": ["roll"]}},
                "allowed_tools": ["roll"], "defer_loading": True, "headers": {"a": "b"}}]),
        ("Rolls.", "2d4", '"approve":true', '"output":"seven"'), ("mcp",)),
    Example("a connector", asks(tools=[
        {"type": "mcp", "server_label": "Dropbox", "connector_id": "connector_dropbox",
         "authorization": "token", "require_approval": "always"}]), (), ("mcp",)),
    Example("a shell in a container", asks(tools=[
        {"type": "shell", "environment": {
            "type": "container_auto", "network_policy": {
                "type": "allowlist", "allowed_domains": ["example.com"]},
            "skills": [{"type": "skill_reference", "skill_id": "skill_1"}, INLINE]}}]),
        (), ("shell",)),
]

CLIENT_RUN = [
    Example("a shell of the client", asks(
        {"type": "shell_call", "id": "sh_1", "call_id": "call_1", "status": "completed",
         "caller": DIRECT, "environment": {"type": "local"},
         "action": {"commands": ["ls"], "timeout_ms": 120_000, "max_output_length": 4096}},
        {"type": "shell_call_output", "call_id": "call_1", "max_output_length": 4096, "output": [
            {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        tools=[{"type": "shell", "environment": {"type": "local", "skills": [SKILL]}}]),
        ('"commands": ["ls"]', '"stdout":"a.py"')),
    Example("a shell of the client, the older form", asks(
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "status": "completed",
         "action": {"type": "exec", "command": ["ls", "-l"], "env": {"A": "b"},
                    "working_directory": "/src", "timeout_ms": 5, "user": "me"}},
        {"type": "local_shell_call_output", "id": "call_1", "output": '{"stdout": "a.py"}'},
        tools=[{"type": "local_shell"}]), ('"ls", "-l"', "/src", '{"stdout": "a.py"}')),
    Example("patches", asks(
        {"type": "apply_patch_call", "id": "apc_1", "call_id": "call_1", "status": "completed",
         "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-1\n+2"}},
        {"type": "apply_patch_call_output", "call_id": "call_1", "status": "failed",
         "output": "No such line."}, tools=[{"type": "apply_patch"}],
        tool_choice={"type": "apply_patch"}), ("update_file", "a.py", "failed\nNo such line.")),
    Example("patches are allowed", asks(
        tools=[WEATHER, {"type": "apply_patch"}, {"type": "shell"}], tool_choice={
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "apply_patch"}]}),
        ("apply_patch", "shell", "get_weather")),
]

STATE = [
    Example("structured outputs: a schema", asks(text={"format": {
        "type": "json_schema", "name": "event", "strict": True, "schema": EVENT}})),
    Example("structured outputs: any JSON", {
        "input": "Answer in JSON.", "text": {"format": {"type": "json_object"}}}),
    Example("structured outputs: a refusal is sent back", asks(
        {**message(""), "content": [{"type": "refusal", "refusal": "I will not."}]}, user("Why?")),
        ("I will not.",)),
    Example("reasoning: effort and summary", asks(
        reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=300)),
    Example("reasoning: encrypted thoughts are sent back", asks(
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAA",
         "summary": [{"type": "summary_text", "text": "Looked it up."}]}, CALL, RESULT,
        tools=[WEATHER], store=False, include=["reasoning.encrypted_content"]),
        ("get_weather", '{"degrees": 14}')),
    Example("state: messages of all roles", {
        "instructions": "Be brief.", "input": [
            {"role": "developer", "content": "Speak like a pirate."}, user("knock knock."),
            {"role": "assistant", "content": "Who's there?", "phase": "final_answer"},
            {"type": "message", "role": "user", "status": "completed", "content": [
                {"type": "input_text", "text": "Orange."}]}]},
        ("Be brief.", "Speak like a pirate.", "knock knock.", "Who's there?", "Orange.")),
    Example("state: an answer is sent back", asks(message("Why not?"), user("Tell me.")),
            ("Why not?", "Tell me.")),
    Example("state: compaction", asks(
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}, user("Further."),
        store=False, context_management=[{"type": "compaction", "compact_threshold": 200_000}]),
        ("[compaction]", "Further.")),
    Example("state: compaction is asked for", asks({"type": "compaction_trigger"})),
    Example("background", asks(background=True, store=True)),
    Example("pictures and files", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": PICTURE, "detail": "high"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0="}]}]},
        ("What is it?", "[An image was here.", "[A document was here.")),
]
RESPONSES = [*FUNCTIONS, *HOSTED, *CLIENT_RUN, *STATE]


def chats(*messages: Json, **fields: Any) -> Json:
    return {"messages": [user("Go on."), *messages], **fields}


OF_CHAT: Json = {"type": "function", "function": {
    name: it for name, it in WEATHER.items() if name != "type"}}
CALLED: Json = {"id": "call_1", "type": "function", "function": {
    "name": "get_weather", "arguments": '{"location":"Bern"}'}}
CUSTOM: Json = {"type": "custom", "custom": {"name": "run", "format": {
    "type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}}}
CHATS = [
    Example("chat: a call is wanted", chats(tools=[OF_CHAT]), ("get_weather",)),
    Example("chat: results of calls", chats(
        {"role": "assistant", "content": None, "refusal": None, "annotations": [],
         "tool_calls": [CALLED, {**CALLED, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "14"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "cold"}]},
        tools=[OF_CHAT], parallel_tool_calls=True), ('"Bern"', "14", "cold")),
    Example("chat: one is forced", chats(tools=[OF_CHAT], tool_choice={
        "type": "function", "function": {"name": "get_weather"}})),
    Example("chat: some are allowed", chats(tools=[OF_CHAT], tool_choice={
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "get_weather"}}]}})),
    Example("chat: a custom tool", chats(
        {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": "ls"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py"}, tools=[CUSTOM]),
        ('"input": "ls"', "a.py", "[a-z]+")),
    Example("chat: calls as they were before there were tools", chats(
        {"role": "assistant", "content": None, "function_call": CALLED["function"]},
        {"role": "function", "name": "get_weather", "content": "14 degrees"}),
        ('"location": "Bern"', "14 degrees")),
    Example("chat: a schema", chats(response_format={"type": "json_schema", "json_schema": {
        "name": "event", "description": "One.", "strict": True, "schema": EVENT}})),
    Example("chat: a refusal is sent back", chats(
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        user("Why?")), ("I will not.",)),
    Example("chat: web search", chats(web_search_options={"search_context_size": "low"})),
    Example("chat: a recording is sent back", chats(
        {"role": "assistant", "audio": {"id": "audio_1"}}, user("Again.")),
        ("[A recording was here.", "Again.")),
    Example("chat: effort, verbosity and a prediction", chats(
        reasoning_effort="minimal", verbosity="low", max_completion_tokens=300,
        prediction={"type": "content", "content": "x = 1"})),
]
# fmt: on
