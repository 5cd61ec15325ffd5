"""Marks of a conversation are found among its tokens, whatever the template does to the texts.

The tokenizer has one token per byte, so the tokens before a mark are the text before it.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.golden import refused, told
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.errors import ConfigError, RequestError
from tieredkv.server.chat import Tokenization
from tieredkv.server.histories import TOOLS, Mark
from tieredkv.server.run import Server
from tieredkv.server.threads import Cancellation, CancelledWorkError

LLAMA_3 = """{{ '<|bos|>' }}{% if tools %}{{ 'system' }}{% for t in tools %}{{
 t | tojson(indent=4) }}
{% endfor %}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' +
m['content'] | trim + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{
'<|im_start|>assistant\n\n' }}{% endif %}"""
"""A template in the style of Llama 3."""

TOOLS_BEHIND_SYSTEM = """{{ messages[0]['content'] }}{% for t in tools or [] %}{{ t | tojson }}{%
endfor %}{{ '#' }}{% for m in messages[1:] %}{{ '<' + m['content'] + '>' }}{% endfor %}"""
"""A template that puts the tools after the system message, as Qwen does."""

LAST_FIRST = "{{ messages[-1]['content'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""A template that writes the last text twice: first of all and in its place."""

LENGTHS = (
    "{% for m in messages %}{{ '<' + m['content'] + '>' }}{{ m['content'] | length }}{% endfor %}"
)
"""A template that writes the length of each text, which a sign in the text changes."""

NO_EARLY_TEXT = "{% for m in messages %}{{ '<' + m['content'].split('---')[-1] + '>' }}{% endfor %}"
"""A template that drops the reasoning before `---`, as for reasoning models."""

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"b": 1, "a": "é"}}}
OTHER = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": ["You help.  ", "Docs \N{SNOWMAN}\n"]},
    {"role": "user", "content": ["  hé hello\n"]},
    {"role": "assistant", "content": ["sure---yes", "   "]},
    {"role": "user", "content": ["more"]},
]


@pytest.fixture
def tokenization() -> Tokenization:
    return Tokenization(load_tokenizer("tiny-random"))


def heads(
    tokenization: Tokenization,
    marks: Sequence[Mark],
    messages: list[dict[str, Any]] = TALK,
    **arguments: Any,
) -> list[str]:
    """Return the text before each mark."""
    encoded = tokenization.encode_chat(messages, arguments, marks)
    plain = tokenization.encode_chat(messages, arguments)
    assert (encoded.token_ids, []) == plain[:2]
    return [str(tokenization.tokenizer.decode(encoded.token_ids[:end])) for end in encoded.ends]


@pytest.mark.parametrize("template", [None, LLAMA_3])
def test_a_mark_is_behind_the_last_letter_of_its_part(
    tokenization: Tokenization, template: str | None
) -> None:
    tokenization.tokenizer.chat_template = template or tokenization.tokenizer.chat_template
    marks = [(3, 0), (0, 0), (0, 1), (1, 0), (2, 0)]
    last, *others = heads(tokenization, marks)
    assert others[0].endswith("You help.")
    assert others[1].endswith("You help.  \nDocs \N{SNOWMAN}")
    assert others[2].endswith("hé hello")
    assert others[3].endswith("sure---yes")
    assert last.endswith("more")


def test_a_part_without_a_letter_is_marked_at_the_end_of_its_message(
    tokenization: Tokenization,
) -> None:
    assert heads(tokenization, [(2, 1)])[0].endswith("sure---yes\n   <|im_end|>\n")


@pytest.mark.parametrize("template", [None, LLAMA_3, TOOLS_BEHIND_SYSTEM])
def test_a_mark_on_a_tool_is_at_its_end(tokenization: Tokenization, template: str | None) -> None:
    tokenization.tokenizer.chat_template = template or tokenization.tokenizer.chat_template
    first, second, user = heads(tokenization, [(TOOLS, 0), (TOOLS, 1), (1, 0)], tools=[TOOL, OTHER])
    assert first.rstrip(" \n}").endswith('"a": "é"')
    assert "ask" not in first
    assert second.rstrip(" \n}").endswith('"type": "object"')
    assert len(second) < len(user)
    is_system_first = template == TOOLS_BEHIND_SYSTEM
    assert ("You help" in first) == is_system_first


def test_tools_that_the_template_ignores_are_marked_at_the_start(
    tokenization: Tokenization,
) -> None:
    tokenization.tokenizer.chat_template = LAST_FIRST
    assert heads(tokenization, [(TOOLS, 0)], tools=[TOOL]) == [""]


def test_marks_are_at_the_ends_of_messages_where_signs_change_the_text(
    tokenization: Tokenization,
) -> None:
    tokenization.tokenizer.chat_template = LENGTHS
    assert heads(tokenization, [(0, 0), (3, 0)]) == [
        "<You help.  \nDocs \N{SNOWMAN}\n>19",
        str(tokenization.tokenizer.decode(tokenization.encode_chat(TALK, {})[0])),
    ]


def test_a_text_that_moves_ends_where_it_was_said_last(tokenization: Tokenization) -> None:
    tokenization.tokenizer.chat_template = LAST_FIRST
    system, last = heads(tokenization, [(0, 1), (3, 0)])
    assert system == "moreYou help.  \nDocs \N{SNOWMAN}"
    assert last.startswith("more") and last.endswith("more") and len(last) > len(system)


def test_a_part_that_is_dropped_is_marked_at_the_end_of_its_message(
    tokenization: Tokenization,
) -> None:
    tokenization.tokenizer.chat_template = NO_EARLY_TEXT
    messages = [{"role": "user", "content": ["aloud", "---", "said"]}, TALK[3]]
    assert heads(tokenization, [(0, 0), (0, 2)], messages) == ["<\nsaid>", "<\nsaid"]


def test_a_text_may_hold_the_characters_used_as_signs(tokenization: Tokenization) -> None:
    messages = [{"role": "user", "content": ["a\U000f0000", "b"]}, TALK[3]]
    first, _ = heads(tokenization, [(0, 0), (1, 0)], messages)
    assert first.endswith("a\U000f0000")


def test_arguments_of_the_server_reach_the_template_unless_a_request_has_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = "{{ mood }}{{ 'ON' if thinks }}" + LENGTHS
    own = {"mood": "calm", "thinks": True, "nosuch": 1}
    tokenization = Tokenization(tokenizer, template_arguments=own)
    tokenization.try_template()
    [record] = caplog.records
    told(record.getMessage())
    assert tokenization.encode_chat(TALK, {}).text.startswith("calmON<")
    assert tokenization.encode_chat(TALK, {"thinks": False}).text.startswith("calm<")


def test_an_argument_that_is_the_tokenizers_own_is_refused_at_the_start() -> None:
    settings = Settings(model="tiny-random", chat_template_kwargs='{"tools": "x"}')
    server = Server(settings=settings, on_progress=lambda *_: None, on_ready=lambda *_: None)
    with refused(ConfigError):
        server.serve()


def test_canonical_tools_give_equal_tokens() -> None:
    swapped = {"function": {"parameters": {"a": "é", "b": 1}, "name": "look"}, "type": "function"}
    tokenizer = load_tokenizer("tiny-random")
    for is_canonical in (False, True):
        tokenization = Tokenization(tokenizer, has_canonical_tools=is_canonical)
        one, two = (tokenization.encode_chat(TALK, {"tools": [tool]}) for tool in (TOOL, swapped))
        assert (one == two) == is_canonical


@pytest.mark.parametrize("is_canonical", [False, True])
def test_tools_that_are_nested_too_deep_are_refused(is_canonical: bool) -> None:
    tokenization = Tokenization(load_tokenizer("tiny-random"), has_canonical_tools=is_canonical)
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    with refused(RequestError, param="messages", code="invalid_value"):
        tokenization.encode_chat(TALK, {"tools": [deep]})


def test_all_marks_are_found_where_signs_change_the_text(tokenization: Tokenization) -> None:
    tokenization.tokenizer.chat_template = LENGTHS
    talk = [{"role": "user", "content": ["a"]}] * 200
    marks = [(i, 0) for i in range(200)]
    ends = tokenization.encode_chat(talk, {}, marks).ends
    assert ends == [len("<a>1") * (i + 1) for i in range(200)]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 ** 12 }}",
        "{{ 2 ** (messages | length * 100000) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_a_template_that_breaks_a_limit_is_refused_in_one_sentence(
    tokenization: Tokenization, template: str
) -> None:
    tokenization.tokenizer.chat_template = template
    with refused(RequestError, status=400):
        tokenization.encode_chat(TALK, {})


@pytest.mark.parametrize(
    "template",
    ["{{ range(10 ** 9) | list }}", "{{ 1 // 0 }}", "{{ ''.__class__.__mro__ }}", "{% for %}"],
)
def test_what_jinja_itself_refuses_in_a_template_is_an_error_of_the_request(
    tokenization: Tokenization, template: str
) -> None:
    tokenization.tokenizer.chat_template = template
    with pytest.raises(RequestError) as caught:
        tokenization.encode_chat(TALK, {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_is_given_up_where_nobody_waits_for_it(tokenization: Tokenization) -> None:
    cancellation = Cancellation()
    cancellation.set()
    with pytest.raises(CancelledWorkError):
        tokenization.of("", cancellation).encode_chat(TALK, {})


def test_many_marks_are_followed_in_one_rendering(tokenization: Tokenization) -> None:
    talk = [{"role": "user", "content": [f"{i}."]} for i in range(3000)]
    marks = [(i, 0) for i in range(3000)]
    ends = tokenization.encode_chat(talk, {}, marks).ends
    assert ends == sorted(set(ends))
    assert len(ends) == 3000


def test_a_prompt_that_cannot_fit_is_refused_as_soon_as_that_is_known() -> None:
    tokenization = Tokenization(load_tokenizer("tiny-random"), max_model_len=100)
    long = "a" * 5_000_000
    for ask, field in (
        (lambda: tokenization.encode_prompts([long]), "prompt"),
        (lambda: tokenization.encode_prompts([[1] * 101]), "prompt"),
        (lambda: tokenization.encode_chat([{"role": "user", "content": [long]}], {}), "messages"),
    ):
        with refused(RequestError) as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)
    assert len(tokenization.encode_prompts(["a" * 5000], is_bounded=False)[0]) == 5000


@pytest.mark.parametrize("template", [None, LLAMA_3, TOOLS_BEHIND_SYSTEM, NO_EARLY_TEXT])
def test_the_next_turn_may_begin_where_the_last_message_and_the_last_question_end(
    tokenization: Tokenization, template: str | None
) -> None:
    tokenizer = tokenization.tokenizer
    tokenizer.chat_template = template or tokenizer.chat_template
    asked = tokenization.encode_chat(TALK, {})
    [end] = asked.anchors
    without = tokenization.encode_chat(TALK, {"add_generation_prompt": False})
    assert without.token_ids[:end] == asked.token_ids[:end]
    assert "more" in str(tokenizer.decode(asked.token_ids[:end]))[-16:]
    called = [
        *TALK,
        {"role": "assistant", "content": ["calls"]},
        {"role": "tool", "content": ["b"]},
    ]
    question, last = tokenization.encode_chat(called, {}).anchors
    assert question == end
    assert question < last
