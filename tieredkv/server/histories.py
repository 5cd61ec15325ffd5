"""Give a conversation the form in which a chat template takes it.

Templates differ in what they take: the arguments of a call as an object or as JSON text, a message
of calls alone with an empty text or with none, several calls in one message or only one, two
messages of the user in a row or roles that alternate. What one of them wants, another refuses or
silently leaves out. So a template is tried with tiny conversations, and the first form is taken in
which nothing is lost. Where none is, the conversation stays as the APIs have it.

This module knows messages and templates, but neither tokens nor HTTP.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tieredkv.errors import RequestError
from tieredkv.server.message_parser import Family

Mark = tuple[int, int]
"""Marks the end of a part, by the indexes of its message and of the part in it, or the end of a
tool, by `TOOLS` and the tool's index."""

TOOLS = -1

Messages = Sequence[Mapping[str, Any]]
"""Messages as chat templates take them, except that `content` is a list of texts."""

Render = Callable[[list[dict[str, Any]]], str]
"""Renders messages as chat templates take them; raises RequestError where the template refuses."""


class Form(NamedTuple):
    """The form in which a template takes conversations; by default as the APIs have them.

    Attributes:
        arguments: how the arguments of a call are given.
        is_blank_none: whether a message of calls alone has no content, instead of an empty text.
        has_parts: whether contents are lists of parts, instead of texts.
        splits_text: whether a text beside calls is given in a message of its own, before them; the
            thoughts stay beside the calls.
        splits_calls: whether each of several calls is given in a message of its own, followed by
            its result.
        joins: whether messages in a row that have the same role and no calls become one.
        joins_systems: whether the system messages that a conversation begins with become one.
        system: the role that system messages get behind the first messages.
        has_system: whether there may be system messages at all.
        thoughts: what thoughts beside calls are called.
    """

    arguments: Literal["object", "text"] = "object"
    is_blank_none: bool = False
    has_parts: bool = False
    splits_text: bool = False
    splits_calls: bool = False
    joins: bool = False
    joins_systems: bool = False
    system: Literal["system", "user"] = "system"
    has_system: bool = True
    thoughts: Literal["reasoning_content", "thinking"] = "reasoning_content"

    def shaped(
        self, messages: Messages, marks: Sequence[Mark] = (), family: Family | None = None
    ) -> tuple[list[Mapping[str, Any]], list[Mark]]:
        """Return a conversation in this form, and the marks in it.

        Args:
            messages: the conversation.
            marks: on its parts and tools.
            family: how the model writes messages; it may have a form for the ids of calls.
        """
        made = [*self._split(_with_ids(messages, family.call_ids if family else ""))]
        roles = {"user", "assistant"} if self.joins else set[str]()
        if self.joins_systems:
            roles.add("system")
        if roles:
            made = _joined_in_rows(made, roles)
        places = {part: (new, j) for new, it in enumerate(made) for j, part in enumerate(it.parts)}
        last = {old: new for new, it in enumerate(made) for old in it.olds}
        moved = [
            mark if mark[0] == TOOLS else places.get(mark, (last[mark[0]], -1)) for mark in marks
        ]
        return [it.message for it in made], moved

    def contents(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages with the contents that the template takes."""
        made = []
        for message in messages:
            content: Any = "\n".join(message["content"])
            if self.is_blank_none and not content and message.get("tool_calls"):
                content = None
            elif self.has_parts:
                content = [{"type": "text", "text": content}] if content else []
            made.append({**message, "content": content})
        return made

    def _split(self, messages: Messages) -> "Iterator[_Made]":
        """Yield messages of this form, each with the old ones and the parts that are in it."""
        index, is_begun = 0, False
        while index < len(messages):
            message, olds = messages[index], {index}
            parts = [(index, j) for j in range(len(message["content"]))]
            index += 1
            if message["role"] == "system" and (is_begun or not self.has_system):
                message = {**message, "role": self.system}
            is_begun = is_begun or message["role"] != "system"
            calls = message.get("tool_calls") or []
            if not calls or message["role"] != "assistant":
                yield _Made(message, olds, parts)
                continue
            message = self._with_calls(message, calls)
            calls = message["tool_calls"]
            if self.splits_text and any(message["content"]):
                of_calls = ("tool_calls", "thinking", "reasoning_content")
                text = {key: it for key, it in message.items() if key not in of_calls}
                yield _Made(text, olds, parts)
                message, parts = {**message, "content": []}, []
            if not self.splits_calls or len(calls) == 1:
                yield _Made(message, olds, parts)
                continue
            results = list[_Made]()
            while index < len(messages) and messages[index]["role"] == "tool":
                result = messages[index]
                places = [(index, j) for j in range(len(result["content"]))]
                results.append(_Made(result, {index}, places))
                index += 1
            ids = [call.get("id") for call in calls]
            for call, id in zip(calls, ids, strict=True):
                yield _Made({**message, "tool_calls": [call]}, olds, parts)
                names = [it.message.get("tool_call_id") for it in results]
                found = [i for i, name in enumerate(names) if name == id]
                found += [i for i, name in enumerate(names) if name not in ids]
                if found:
                    yield results.pop(found[0])
                message, parts = {"role": "assistant", "content": []}, []
            yield from results

    def _with_calls(self, message: Mapping[str, Any], calls: Sequence[Any]) -> dict[str, Any]:
        made = {**message, "tool_calls": [*calls]}
        if self.arguments == "text":
            made["tool_calls"] = [
                {**call, "function": _with_text(call.get("function") or {})} for call in calls
            ]
        is_alone = self.splits_text or not any(message["content"])
        if self.thoughts == "thinking" and is_alone and message.get("reasoning_content"):
            made["thinking"] = message["reasoning_content"]
        return made


class _Made(NamedTuple):
    """A message, the indexes of the messages that it was made of, and the parts that it has."""

    message: Mapping[str, Any]
    olds: set[int]
    parts: list[Mark]


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _joined_in_rows(made: Sequence[_Made], roles: Collection[str]) -> list[_Made]:
    """Join messages of one of these roles, and without calls, that follow each other."""
    rows = list[_Made]()
    for each in made:
        last = rows[-1] if rows else None
        if (
            last is None
            or each.message["role"] not in roles
            or last.message["role"] != each.message["role"]
            or last.message.get("tool_calls")
            or each.message.get("tool_calls")
        ):
            rows.append(each)
            continue
        content = [*last.message["content"], *each.message["content"]]
        thoughts = [it.message.get("reasoning_content", "") for it in (last, each)]
        message = {**last.message, "content": content}
        if any(thoughts):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))
        rows[-1] = _Made(message, last.olds | each.olds, last.parts + each.parts)
    return rows


def _with_ids(messages: Messages, form: str) -> Messages:
    """Return messages whose calls have ids as the model's family writes them.

    An id that the model wrote itself, and that has this form, is kept behind the prefix that an API
    has put before it.
    """
    if not form:
        return messages
    new_of, made, count = dict[str, str](), list[Mapping[str, Any]](), 0
    for message in messages:
        if calls := message.get("tool_calls"):
            new = []
            for call in calls:
                own = str(call.get("id", "")).rpartition("_")[2]
                id = form.replace("{index}", str(count)).replace("{nine}", f"{count:09}")
                if "{nine}" in form and re.fullmatch(r"[a-zA-Z0-9]{9}", own):
                    id = own
                id = id.replace("{name}", str(call["function"]["name"]))
                new_of[str(call.get("id", ""))] = id
                new.append({**call, "id": id})
                count += 1
            message = {**message, "tool_calls": new}
        elif message.get("tool_call_id") in new_of:
            message = {**message, "tool_call_id": new_of[message["tool_call_id"]]}
        made.append(message)
    return made


# --- Finding the form

TOOL = {
    "type": "function",
    "function": {
        "name": "pry4tool",
        "description": "Pry.",
        "parameters": {
            "type": "object",
            "properties": {"pry4what": {"type": "string", "description": "What."}},
        },
    },
}
"""The one tool of the conversations with which templates are tried.

Its parameter has another name than the arguments that are looked for, because templates may print
tools in other ways than calls.
"""

_ASKED: Any = {"role": "user", "content": ["Pry4asked"]}
_ANSWERED: Any = {"role": "assistant", "content": ["Pry4answered"]}
_BROKEN = ("{'pry4key'", "'pry4key':", r"\"pry4key\"")
"""Arguments that are printed as Python does, or quoted twice."""


def find_form(render: Render, names: frozenset[str], family: Family | None = None) -> Form:
    """Return the form in which a template takes conversations.

    Args:
        render: renders messages with the template and `TOOL`.
        names: of the attributes that the template reads with a dot.
        family: how the model writes messages.
    """

    def rendered(form: Form, messages: Messages) -> str:
        """Return a conversation as it is rendered; empty if the template refuses it."""
        try:
            return render(form.contents(form.shaped(messages, (), family)[0]))
        except RequestError:
            return ""

    def is_whole(form: Form, messages: Messages, *told: str) -> bool:
        """Return whether a conversation is rendered with all that it tells."""
        text = rendered(form, messages)
        return all(each in text for each in told) and not any(each in text for each in _BROKEN)

    def keeps_text(form: Form, messages: Messages) -> bool:
        """Return whether a text beside a call is rendered, and before the result of the call."""
        text = rendered(form, messages)
        return is_whole(form, messages, *told, "Pry4answered") and (
            text.find("Pry4answered") < text.find("Pry4result0")
        )

    def first(form: Form, others: Sequence[Form], messages: Messages, *told: str) -> Form:
        """Return the first form in which a conversation is whole; if there is none, the first."""
        return next((it for it in (form, *others) if is_whole(it, messages, *told)), form)

    form = Form()
    if "thinking" in names and "reasoning_content" not in names:
        form = form._replace(thoughts="thinking")
    form = first(form, [form._replace(has_parts=True)], [_ASKED], "Pry4asked")
    if not is_whole(form, [_ASKED], "Pry4asked"):
        return form
    called = [_ASKED, _calling(0), _result(0)]
    forms = [
        form._replace(arguments=arguments, is_blank_none=is_blank_none)
        for arguments in ("object", "text")
        for is_blank_none in (False, True)
    ]
    told = ["pry4tool", "pry4key", "Pry4value0", "Pry4result0"]
    form = first(form, forms, called, *told)
    twice = [_ASKED, _calling(0, 1), _result(0), _result(1), _ANSWERED, _ASKED]
    values = [f"Pry4{what}{i}" for i in (0, 1) for what in ("value", "result")]
    form = first(form, [form._replace(splits_calls=True)], twice, *values)
    beside = [_ASKED, {**_calling(0), **_ANSWERED}, _result(0)]
    if not keeps_text(form, beside):
        beside += [{**_ANSWERED, "content": ["End."]}, _ASKED]
        forms = [form, form._replace(splits_text=True)]
        form = next((it for it in forms if keeps_text(it, beside)), form)
    joining = form._replace(joins=True)
    again = {"role": "user", "content": ["Pry4again"]}
    form = first(form, [joining], [_ASKED, again], "Pry4asked", "Pry4again")
    rule = {"role": "system", "content": ["Pry4rule"]}
    others = [it._replace(system="user") for it in (form, joining)]
    talk = [_ASKED, _ANSWERED, rule, _ASKED]
    form = first(form, others, talk, "Pry4rule", "Pry4answered")
    begun = [rule, _ASKED, _ANSWERED, _ASKED]
    form = first(form, [it._replace(has_system=False) for it in others], begun, "Pry4rule")
    rules = [{"role": "system", "content": ["Pry4first"]}, rule, _ASKED]
    return first(form, [form._replace(joins_systems=True)], rules, "Pry4first", "Pry4rule")


def _calling(*indexes: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_pry4{i:05}",
            "type": "function",
            "function": {"name": "pry4tool", "arguments": {"pry4key": f"Pry4value{i}"}},
        }
        for i in indexes
    ]
    return {"role": "assistant", "content": [], "tool_calls": calls}


def _result(index: int) -> dict[str, Any]:
    id = f"call_pry4{index:05}"
    return {"role": "tool", "tool_call_id": id, "content": [f"Pry4result{index}"]}
