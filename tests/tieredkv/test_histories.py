"""Conversations reach each chat template in a form in which it loses nothing.

The templates are made for these tests; each has traits of those of a family.
"""

import json
import re
from typing import Any

import pytest

from tests.golden import refused
from tests.tieredkv.test_remembered import HERMES, made_tokenizer
from tieredkv.errors import RequestError
from tieredkv.server.chat import PLAIN, Tokenization
from tieredkv.server.histories import TOOLS, Form
from tieredkv.server.message_parser import families

MESSAGES = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
BODY = "{{ '<|im_start|>' + m.role + ':' }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}"
ALTERNATING = """{% set ns = namespace(i=0) %}{% for m in messages %}
{%- if not (m.role == 'tool' or m.tool_calls or (m.role == 'system' and loop.first)) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('Roles must alternate') }}
{%- endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"""
JSON_CALLS = CALLS + "{{ c.function.arguments | tojson }}{% endfor %}"

TEMPLATES: dict[str, tuple[str, Form]] = {
    "as DeepSeek-V3.1": (
        MESSAGES + BODY + "{{ m.content }}" + CALLS + "{{ '' + c.function.arguments }}{% endfor %}"
        "{{ '<|im_end|>' }}" + END,
        Form(arguments="text"),
    ),
    "prints Python": (
        MESSAGES + BODY + "{{ m.content }}" + CALLS + "{{ c.function.arguments }}{% endfor %}"
        + END,
        Form(arguments="text"),
    ),
    "as Qwen3-Coder": (
        MESSAGES + BODY + "{{ m.content }}" + CALLS
        + "{% for k, v in c.function.arguments.items() %}"
        "{{ '<' + k + '>' }}{{ v if v is string else v | tojson }}{% endfor %}{% endfor %}" + END,
        Form(),
    ),
    "as DeepSeek-R1": (
        MESSAGES + BODY + "{% if m.content is none %}" + CALLS + "{{ '' + c.function.arguments }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}" + END,
        Form(arguments="text", is_blank_none=True, splits_text=True),
    ),
    "as Llama 3": (
        MESSAGES + BODY + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('Only one call at once') }}{% endif %}" + JSON_CALLS + "{% else %}"
        "{{ m.content }}{% endif %}" + END,
        Form(splits_text=True, splits_calls=True),
    ),
    "as Mistral": (
        ALTERNATING + MESSAGES + "{{ '[' + m.role + ']' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}"
        "{% endif %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% if m.role == 'tool' %}"
        "{{ '[id]' + m.tool_call_id }}{% endif %}" + END,
        Form(joins=True, joins_systems=True, system="user"),
    ),
    "as Qwen3.5": (
        MESSAGES + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
        "{% endif %}" + BODY + "{{ m.content }}" + JSON_CALLS + END,
        Form(joins_systems=True, system="user"),
    ),
    "drops late systems": (
        MESSAGES + "{% if m.role != 'system' or loop.first %}" + BODY + "{{ m.content }}"
        + JSON_CALLS + "{% endif %}" + END,
        Form(joins_systems=True, system="user"),
    ),
    "as Gemma 2": (
        ALTERNATING + MESSAGES + "{% if m.role == 'system' %}{{ raise_exception('No system') }}"
        "{% endif %}" + BODY + "{{ m.content }}" + JSON_CALLS + END,
        Form(joins=True, system="user", has_system=False),
    ),
    "as vision models": (
        MESSAGES + BODY + "{% for p in m.content %}{{ p.text }}{% endfor %}" + JSON_CALLS + END,
        Form(has_parts=True),
    ),
    "as gpt-oss": (
        MESSAGES + BODY + "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
        "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.content or m.thinking or '' }}{{ '<call>' + c.function.name }}"
        "{{ c.function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}" + END,
        Form(splits_calls=True, thoughts="thinking"),
    ),
    "as Qwen3": (HERMES, Form()),
}  # fmt: skip
FAMILY = {"as Mistral": "mistral"}


def tokenization_of(name: str) -> Tokenization:
    family = families().get(FAMILY.get(name, ""))
    return Tokenization(made_tokenizer(TEMPLATES[name][0]), family=family)


def called(*indexes: int, text: str = "", **others: Any) -> dict[str, Any]:
    functions = [{"name": f"tool{i}", "arguments": {"é": [f'a"{i}', None]}} for i in indexes]
    ids = [f"call_{i:024}" for i in indexes]
    calls = [{"id": id, "function": it} for id, it in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": [text] * bool(text), "tool_calls": calls, **others}


def result(index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index:024}", "content": [f"result{index}"]}


def of(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [*texts]}


USER, ANSWER = of("user", "asked0"), of("assistant", "said0")
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "a call": [USER, called(0), result(0)],
    "two calls": [USER, called(0, 1), result(0), result(1), ANSWER, of("user", "asked1")],
    "results in another order": [USER, called(0, 1), result(1), result(0)],
    "a call without its result": [USER, called(0, 1), result(1)],
    "a text beside a call": [USER, called(0, text="said1"), result(0)],
    "two turns of a loop": [USER, called(0), result(0), called(1), result(1), ANSWER, USER],
    "systems": [of("system", "rule0"), of("system", "rule1"), USER],
    "a late system": [of("system", "rule0"), USER, ANSWER, of("system", "rule1"), of("user", "b")],
    "users in a row": [USER, of("user", "asked1", "asked2"), ANSWER, of("user", "asked3")],
}


def told(messages: list[dict[str, Any]]) -> list[str]:
    texts = [text for it in messages for text in it["content"]]
    return texts + [
        call["function"]["name"] for it in messages for call in it.get("tool_calls", ())
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_that_a_template_takes_is_found(name: str) -> None:
    assert tokenization_of(name).form({}) == TEMPLATES[name][1]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost(name: str, history: str) -> None:
    messages = HISTORIES[history]
    text = tokenization_of(name).encode_chat(messages, {}).text
    assert [each for each in told(messages) if each not in text] == []
    if name == "as Qwen3-Coder":
        return
    arguments = [
        call["function"]["arguments"] for it in messages for call in it.get("tool_calls", ())
    ]
    assert [it for it in arguments if json.dumps(it, ensure_ascii=False) not in text] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_stay_at_the_ends_of_their_parts(name: str) -> None:
    tokenization = tokenization_of(name)
    messages = [
        of("system", "rule0"), of("system", "rule1"), USER, of("user", "asked1", "asked2"),
        called(0, 1, text="said1"), result(0), result(1), ANSWER, of("user", "asked3"),
    ]  # fmt: skip
    marks = [(i, j) for i, it in enumerate(messages) for j in range(len(it["content"]))]
    encoded = tokenization.encode_chat(messages, {}, [*marks, (TOOLS, 0)][: len(marks)])
    assert encoded[0] == tokenization.encode_chat(messages, {}).token_ids
    heads = [str(tokenization.tokenizer.decode(encoded.token_ids[:end])) for end in encoded.ends]
    for (i, j), head in zip(marks, heads, strict=True):
        assert head.rstrip().endswith(messages[i]["content"][j])


def test_a_mark_on_calls_is_behind_the_last_of_them() -> None:
    tokenization = tokenization_of("as Llama 3")
    messages = [USER, called(0, 1, text="said1"), result(0), result(1), USER]
    encoded = tokenization.encode_chat(messages, {}, [(1, -1)])
    head = str(tokenization.tokenizer.decode(encoded.token_ids[: encoded.ends[0]]))
    assert head.endswith('tool1 {"é": ["a\\"1", null]}') and "result0" in head


def test_results_follow_their_calls_where_each_has_a_message() -> None:
    tokenization = tokenization_of("as Llama 3")
    messages = [USER, called(0, 1, 2), result(2), result(0), result(7), USER]
    text = tokenization.encode_chat(messages, {}).text
    order = re.findall(r"tool\d|result\d", text)
    assert order == ["tool0", "result0", "tool1", "result7", "tool2", "result2"]


def test_ids_have_the_form_of_the_family() -> None:
    tokenization = tokenization_of("as Mistral")
    own = called(1)
    own["tool_calls"][0]["id"] = "toolu_aB3dE6gH9"
    messages = [USER, called(0), result(0), own, {**result(1), "tool_call_id": "toolu_aB3dE6gH9"}]
    text = tokenization.encode_chat(messages, {}).text
    assert re.findall(r"\[CALL_ID\](\w+)", text) == ["000000000", "aB3dE6gH9"]
    assert re.findall(r"\[id\](\w+)", text)[0] == "000000000" and "[id]aB3dE6gH9" in text
    more = tokenization.encode_chat([*messages, ANSWER, USER], {}).text
    assert more.startswith(text.removesuffix("<|im_start|>assistant\n"))


def test_thoughts_are_named_as_the_template_wants_them() -> None:
    tokenization = tokenization_of("as gpt-oss")
    messages = [USER, called(0, 1, reasoning_content="thought0"), result(0), result(1)]
    assert tokenization.encode_chat(messages, {}).text.count("thought0") == 1
    beside = [USER, called(0, text="said1", reasoning_content="thought0"), result(0)]
    text = tokenization.encode_chat(beside, {}).text
    assert "said1" in text and "thought0" not in text


def test_what_a_template_refuses_in_every_form_is_told() -> None:
    template = (
        MESSAGES + "{% if m.role == 'tool' %}{{ raise_exception('No tools here') }}{% endif %}"
    )
    tokenization = Tokenization(made_tokenizer(template + "{{ m.content }}" + END))
    assert tokenization.form({}) == PLAIN
    with refused(RequestError, param="messages", code="invalid_value"):
        tokenization.encode_chat([USER, called(0), result(0)], {})


def test_where_a_template_fails_is_told_without_a_text_of_the_client() -> None:
    tokenization = Tokenization(made_tokenizer(MESSAGES + "\n{{ m.content + 1 }}" + END))
    with refused(RequestError, param="messages", code="invalid_value"):
        tokenization.encode_chat([of("user", "secret")], {})


def test_a_template_that_cannot_be_used_is_told_with_the_first_conversation() -> None:
    tokenization = Tokenization(made_tokenizer("{% for %}"))
    tokenization.try_template()
    with refused(RequestError, param="messages", code="invalid_value"):
        tokenization.encode_chat([USER], {})


def test_names_of_special_tokens_may_be_words_of_messages() -> None:
    special = [
        "<|im_start|>",
        "<|im_end|>",
        "<|content|>",
        "<|tool_calls_section_begin|>",
        "<|name|>",
    ]
    template = MESSAGES + "{{ '<|content|>' + m.content }}" + JSON_CALLS + END
    tokenization = Tokenization(made_tokenizer(template, special))
    text = tokenization.encode_chat([USER, called(0), result(0)], {}).text
    assert "asked0" in text and "tool0" in text and "result0" in text
    named = called(0)
    named["tool_calls"][0]["function"]["arguments"] = {"content": "name"}
    assert '{"content": "name"}' in tokenization.encode_chat([USER, named, result(0)], {}).text
