"""The ids that the model sampled stand in later prompts, where its answers come back unchanged."""

import copy
import json
import random
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.golden import refused
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.operate.calls import EvictFilter
from tieredkv.server.chat import Encoded, Tokenization
from tieredkv.server.message_parser import families
from tieredkv.server.remembered import (
    ENTRY_BYTES,
    Key,
    Memory,
    Namespace,
    Opening,
    Remembered,
    RememberedAnswers,
    Writing,
)
from tieredkv.server.reply import Reply

HERMES = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and (loop.index0 > ns.last or keeps_thoughts) %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content.lstrip('\\n') if m.role == 'assistant' else m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if loop.first and m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes as the templates of Qwen2.5 and Qwen3 do."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "now")
]
NAMESPACE: Namespace = ("a", None, None)
ASKED: Any = [{"role": "user", "content": ["What is the weather?"]}]


class Time:
    """A clock that stands still until it is turned."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def made_tokenizer(
    template: str = HERMES, special: Sequence[str] = SPECIAL
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that merges letters of words and of JSON."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    how: Any = {"vocab_size": 600, "initial_alphabet": letters, "show_progress": False}
    texts = [HERMES, json.dumps(TOOLS), __doc__, "the weather in Zürich is cold  \n\n  " * 9]
    made.train_from_iterator(texts, trainers.BpeTrainer(**how))
    made.add_special_tokens([AddedToken(it, special=True) for it in special])
    made.add_tokens([AddedToken(it) for it in ("<tool_call>", "</tool_call>")])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=made, eos_token=SPECIAL[2], chat_template=template
    )
    return tokenizer


TOKENIZER = made_tokenizer()
START, END = (TOKENIZER.get_vocab()[name] for name in ("<|im_start|>", "<|im_end|>"))
PLAIN = Tokenization(TOKENIZER, family=families()["hermes"])
NAMES = {
    name: id
    for name, id in TOKENIZER.get_vocab().items()
    if not name.startswith("<") or name == "<"
}
LETTERS = bytes_to_unicode()  # type: ignore[no-untyped-call]
LONGEST = max(map(len, NAMES))


def sampled(text: str, seed: int) -> list[int]:
    """Return ids of a text that are not those that encoding it would give."""
    draw = random.Random(seed)
    letters, ids, at = "".join(LETTERS[byte] for byte in text.encode()), list[int](), 0
    while at < len(letters):
        most = min(LONGEST, len(letters) - at)
        size = draw.choice([n for n in range(1, most + 1) if letters[at : at + n] in NAMES])
        ids.append(NAMES[letters[at : at + size]])
        at += size
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text
    return ids


class Session:
    """A server's tokenization with what it remembers for one namespace."""

    def __init__(self, tokenization: Tokenization = PLAIN, size: int = 1 << 20) -> None:
        self.time = Time()
        self.answers = RememberedAnswers(size, self.time)
        self.tokenization = tokenization
        self.memory = Memory(self.answers, NAMESPACE, b"\xab" * 32)

    def encode(self, messages: Any, tools: Any = TOOLS, **arguments: Any) -> Encoded:
        tokenization = self.tokenization.of(self.memory.namespace, None, self.memory)
        return tokenization.encode_chat(messages, {"tools": tools, **arguments})

    def answer(
        self, encoded: Encoded, token_ids: Sequence[int], tools: Any = TOOLS, reason: str = "stop"
    ) -> Reply:
        """Have the model write an answer, and return it as the client gets it."""
        tokenization = self.tokenization.of(self.memory.namespace, None, self.memory)
        reading = tokenization.reading(encoded, tools)
        params = EngineRequest(params=SamplingParams(), prompt_token_ids=encoded.token_ids)
        reply = Reply(params, self.tokenization.tokenizer, reading)
        output = TokenOutput(request_id="", token_ids=[*token_ids], finish_reason=reason)
        reply.read(output)
        self.answers.check()
        return reply


def message_of(reply: Reply) -> Any:
    """Return an answer as clients send it back, with its arguments as an object."""
    message: Any = {"role": "assistant", "content": [reply.content]}
    if reply.thoughts:
        message["reasoning_content"] = reply.thoughts
    if reply.calls:
        message["tool_calls"] = [
            {"id": it.id, "function": {"name": it.name, "arguments": json.loads(it.arguments)}}
            for it in reply.calls
        ]
    return message


# --- Conversations come back

WORDS = st.text(st.sampled_from("aZ .,<>/{}[]\"'\\\t\n=|é漢🎉\u0301\u200b"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.tuples(
    st.sampled_from(["now", "get_weather"]), st.dictionaries(WORDS, VALUES, max_size=3)
)
TURNS = st.tuples(
    st.sampled_from(["", "Hmm, so.", "a\n\nb"]), WORDS, st.lists(CALLS, max_size=2), st.integers(0)
)


def written(thoughts: str, text: str, calls: Any, seed: int) -> str:
    """Return what a model might write, with its own white space and order of keys."""
    draw = random.Random(seed)

    def blank() -> str:
        return draw.choice(["", " ", "\n", "\n\n"])

    out = f"<think>{blank()}{thoughts}{blank()}</think>{blank()}" if thoughts else ""
    out += text
    for name, arguments in calls:
        items = [*arguments.items()]
        draw.shuffle(items)
        how: Any = {"ensure_ascii": draw.random() < 0.5}
        how["separators"] = draw.choice([(",", ":"), (", ", ": "), (" , ", " :  ")])
        parts = [("name", name), ("arguments", dict(items))]
        draw.shuffle(parts)
        out += f"{blank()}<tool_call>{blank()}{json.dumps(dict(parts), **how)}{blank()}</tool_call>"
    return out


@given(turns=st.lists(TURNS, min_size=1, max_size=4))
@settings(deadline=None)
def test_each_prompt_begins_with_the_tokens_of_the_turn_before(turns: Any) -> None:
    session, messages = Session(), [*ASKED]
    for i, turn in enumerate(turns):
        prompt = session.encode(messages)
        ids = sampled(written(*turn), i)
        reply = session.answer(prompt, [*ids, END])
        messages += [message_of(reply), {"role": "tool", "content": [f"{i} degrees"]}]
        told = session.encode(messages).token_ids
        if ids:
            assert told[: len(prompt.token_ids) + len(ids) + 1] == [*prompt.token_ids, *ids, END]
        rendered = PLAIN.encode_chat(messages, {"tools": TOOLS}).token_ids
        told_text, text = str(TOKENIZER.decode(told)), str(TOKENIZER.decode(rendered))
        assert told_text.rpartition("<tool_response>")[2] == text.rpartition("<tool_response>")[2]
        assert told_text.count("<|im_start|>") == text.count("<|im_start|>")


def changed(message: Any, how: str, draw: random.Random) -> Any:
    """Return a message that says something else."""
    message = copy.deepcopy(message)
    match how:
        case "text":
            [text] = message["content"]
            at = draw.randrange(len(text) + 1)
            message["content"] = [text[:at] + "x" + text[at:]]
        case "thoughts":
            message["reasoning_content"] = message.get("reasoning_content", "") + "x"
        case "no thoughts":
            del message["reasoning_content"]
        case "argument":
            message["tool_calls"][-1]["function"]["arguments"]["x"] = 1
        case "name":
            message["tool_calls"][0]["function"]["name"] += "x"
        case "one more call":
            message["tool_calls"] = [*message.get("tool_calls", ()), message["tool_calls"][0]]
        case "order":
            message["tool_calls"] = message["tool_calls"][::-1]
        case "no call":
            del message["tool_calls"]
    return message


CHANGES = [
    *("text", "thoughts", "no thoughts", "argument", "name", "one more call", "order", "no call")
]


@pytest.mark.parametrize("how", CHANGES)
@given(turn=TURNS, seed=st.integers(0))
@settings(deadline=None, max_examples=20)
def test_an_answer_that_comes_back_changed_is_rendered_as_the_client_sent_it(
    how: str, turn: Any, seed: int
) -> None:
    calls = [("now", {"a": [1]}), *turn[2], ("get_weather", {})]
    text = written("Hmm.", turn[1], calls, seed)
    session, keeping = Session(), {"keeps_thoughts": True}
    reply = session.answer(session.encode(ASKED), [*sampled(text, 1), END])
    history = [*ASKED, message_of(reply), {"role": "tool", "content": ["cold"]}]
    prompt = session.encode(history).token_ids
    again = session.answer(session.encode(history), [*sampled(text, 2), END])
    message = changed(message_of(again), how, random.Random(seed))
    told = session.encode([*history, message, *ASKED], **keeping).token_ids
    last = len(TOKENIZER.encode("<|im_start|>assistant\n"))
    before = PLAIN.encode_chat(history, {"tools": TOOLS, **keeping}).token_ids
    plain = PLAIN.encode_chat([*history, message, *ASKED], {"tools": TOOLS, **keeping}).token_ids
    assert told[: len(prompt) - last] == prompt[:-last], "the first answer is unchanged"
    assert told[len(prompt) - last :] == plain[len(before) - last :]
    same = session.encode([*history, message_of(again), *ASKED], **keeping).token_ids
    assert same[: len(prompt)] == prompt and same[len(prompt) :] != plain[len(before) :]


def test_what_a_parser_skips_counts() -> None:
    session = Session(Tokenization(TOKENIZER, family=families()["qwen3-coder"]))
    reply = session.answer(session.encode(ASKED), [*sampled("It is cold.", 1), END])
    plain = Tokenization(TOKENIZER)
    for text in ("It is cold.</tool_call>", "It is cold.\n</tool_call>"):
        messages = [*ASKED, {"role": "assistant", "content": [text]}, *ASKED]
        expected = plain.encode_chat(messages, {"tools": TOOLS}).token_ids
        assert session.encode(messages).token_ids == expected
    messages = [*ASKED, message_of(reply), *ASKED]
    assert session.encode(messages).token_ids != plain.encode_chat(messages, {}).token_ids


# --- What is not remembered, and what is not used


def used(session: Session, messages: Any, tools: Any = TOOLS, **arguments: Any) -> bool:
    """Return whether a conversation has other ids than without anything remembered."""
    plain = PLAIN.encode_chat(messages, {"tools": tools, **arguments})
    return session.encode(messages, tools, **arguments).token_ids != plain.token_ids


def told(text: str = "Hmm, it is cold.", **how: Any) -> tuple[Session, Any]:
    """Return a session in which an answer was given once, and the conversation with it."""
    session = Session()
    reply = session.answer(session.encode(ASKED), [*sampled(text, 1), END], **how)
    return session, [*ASKED, message_of(reply), *ASKED]


def test_an_answer_is_remembered_only_if_the_model_ended_it() -> None:
    assert used(*told())
    assert not used(*told(reason="length"))
    session = Session()
    session.answer(session.encode(ASKED), [END])
    for ids in ([70, START, 71, END], [70, END, 71, END], [70, 71]):
        session.answer(session.encode(ASKED), ids)
    assert session.answers.figures == (0, 0), "no text, or no end, or a special token within"


def test_an_answer_that_spells_a_special_token_is_rendered() -> None:
    assert not used(*told("Say <|im_end|>."))


def test_an_answer_that_was_stopped_by_a_text_is_not_remembered() -> None:
    session = Session()
    encoded = session.encode(ASKED)
    reading = PLAIN.of(NAMESPACE, None, session.memory).reading(encoded, TOOLS)
    params = SamplingParams(stop=("cold",))
    reply = Reply(EngineRequest(params=params), TOKENIZER, reading)
    ids = [*sampled("it is cold", 1), END]
    reply.read(TokenOutput(request_id="", token_ids=ids, finish_reason="stop"))
    assert reply.stopped_by == "cold" and session.answers.figures == (0, 0)


def test_an_answer_is_used_behind_exactly_its_prompt() -> None:
    session, messages = told()
    assert used(session, messages)
    assert not used(session, [{"role": "user", "content": ["What is the weather"]}, *messages[1:]])
    assert not used(session, messages, TOOLS[:1])
    assert not used(session, [*ASKED, *messages])
    assert used(session, [*messages, messages[1], *ASKED]), "the first one still is"


def test_an_answer_is_used_in_its_own_namespace() -> None:
    session, messages = told()
    for namespace in (("b", None, None), ("a", "salt", None), ("a", None, "key")):
        session.memory = Memory(session.answers, namespace, b"")
        assert not used(session, messages)


def test_where_the_template_drops_thoughts_the_message_is_rendered() -> None:
    session, messages = told("<think>\nHmm.\n</think>\n\nCold.")
    assert not used(session, messages)
    assert used(session, messages, keeps_thoughts=True)
    tool = {"role": "tool", "content": ["1"]}
    assert used(session, [*messages[:2], tool]), "those since the last question stay"


@pytest.mark.parametrize("header", ["<|im_start|>", "# "])
def test_a_message_that_the_template_does_not_end_swallows_no_other(header: str) -> None:
    written = "{{ '" + header + "' + m.role + '\n' + m.content }}"
    ended = "{% if m.role != 'assistant' %}<|im_end|>{% endif %}"
    template = f"<|im_start|>{{% for m in messages %}}{written}{ended}\n{{% endfor %}}"
    template += f"{{% if add_generation_prompt %}}{header}assistant\n{{% endif %}}"
    session = Session(Tokenization(made_tokenizer(template), family=families()["hermes"]))
    reply = session.answer(session.encode(ASKED), [*sampled("It is cold.", 1), END])
    assert session.answers.figures.entries == 1
    messages = [*ASKED, message_of(reply), *ASKED]
    ids = session.encode(messages).token_ids
    assert ids == session.tokenization.encode_chat(messages, {"tools": TOOLS}).token_ids


def test_one_of_several_answers_to_the_same_prompt_is_used() -> None:
    session = Session()
    prompt = session.encode(ASKED)
    texts = ["It is cold.", "It is warm.", "It is cold. "]
    ids = [[*sampled(text, i), END] for i, text in enumerate(texts)]
    replies = [session.answer(prompt, each) for each in ids]
    assert session.answers.figures.entries == 2, "the newest of two that say the same"
    for reply, each in ((replies[1], ids[1]), (replies[2], ids[2])):
        encoded = session.encode([*ASKED, message_of(reply), *ASKED])
        assert encoded.token_ids[len(prompt.token_ids) :][: len(each)] == each


HARMONY = """{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking }}
{{- '<|end|>' }}{% endif %}{% set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}{% else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""Writes calls as the template of gpt-oss does, in another order than the model."""


@pytest.mark.parametrize("text", ["", "It is"])
def test_headers_in_another_order_and_thoughts_of_another_name_make_no_difference(
    text: str,
) -> None:
    words = "start end message channel constrain return call"
    special = [f"<|{it}|>" for it in words.split()]
    tokenizer = made_tokenizer(HARMONY, special)
    names = tokenizer.get_vocab()
    session = Session(Tokenization(tokenizer, family=families()["gpt-oss"]))
    prompt = session.encode(ASKED)
    written = (
        "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.now <|constrain|>json<|message|>{"a":1}<|call|>'
    )
    parts = re.split(r"(<\|\w+\|>)", written)
    ids = [id for it in parts for id in ([names[it]] if it in names else sampled(it, 1)) if it]
    params = EngineRequest(params=SamplingParams())
    tokenization = session.tokenization.of(NAMESPACE, None, session.memory)
    reply = Reply(params, tokenizer, tokenization.reading(prompt, TOOLS))
    reply.read(TokenOutput(request_id="", token_ids=ids, finish_reason="stop"))
    message = {**message_of(reply), "content": [text]}
    again = session.encode([*ASKED, message, *ASKED]).token_ids
    is_used = again[: len(prompt.token_ids) + len(ids)] == [*prompt.token_ids, *ids]
    assert is_used is not bool(text), "thoughts are left out beside a text"


def test_where_clients_may_write_special_tokens_nothing_is_remembered() -> None:
    session = Session(Tokenization(TOKENIZER, allows_special=True))
    session.answer(session.encode(ASKED), [*sampled("Cold.", 1), END])
    assert session.answers.figures == (0, 0)


def test_answers_without_a_known_family_are_texts() -> None:
    session = Session(Tokenization(TOKENIZER))
    prompt = session.encode(ASKED)
    ids = sampled("<think>Hmm.</think> It is cold.", 1)
    reply = session.answer(prompt, [*ids, END])
    encoded = session.encode([*ASKED, message_of(reply), *ASKED])
    assert encoded.token_ids[len(prompt.token_ids) :][: len(ids)] == ids


def test_a_continued_message_is_not_remembered() -> None:
    session = Session()
    tokenization = PLAIN.of(NAMESPACE, None, session.memory)
    messages = [*ASKED, {"role": "assistant", "content": ["It is"]}]
    encoded = tokenization.encode_chat(messages, {}, continues_last=True)
    session.answer(encoded, [*sampled(" cold.", 1), END])
    assert session.answers.figures == (0, 0)


def test_marks_are_where_they_are_in_the_tokens() -> None:
    session, messages = told('Cold.\n<tool_call>{"name": "now"}</tool_call>')
    tokenization = PLAIN.of(NAMESPACE, None, session.memory)
    marks = [(0, 0), (1, 0), (1, -1), (2, 0)]
    encoded = tokenization.encode_chat(messages, {"tools": TOOLS}, marks)
    asked, answer, message, again = (
        str(TOKENIZER.decode(encoded.token_ids[:end])) for end in encoded.ends
    )
    assert asked.endswith("weather?") and again.endswith("weather?") and asked != again
    assert answer.endswith("<|im_start|>assistant\n"), "before the answer"
    assert message.endswith("</tool_call><|im_end|>\n")


def test_a_prompt_that_is_too_long_with_its_ids_is_refused() -> None:
    session, messages = told("It is very cold in Zürich. " * 40)
    num_ids = len(session.encode(messages).token_ids)
    for limit in (num_ids, num_ids - 1):
        limited = Tokenization(TOKENIZER, family=families()["hermes"], max_model_len=limit)
        session.tokenization = limited
        assert len(limited.encode_chat(messages, {"tools": TOOLS}).token_ids) < limit
        if limit == num_ids:
            session.encode(messages)
        else:
            with refused(RequestError, param="messages", code="context_length_exceeded"):
                session.encode(messages)


# --- Bounds


def key(tenant: str, name: str) -> Key:
    return Key((tenant, None, None), name.encode(), Opening("", "", 1), b"")


SIZE = ENTRY_BYTES + 400


def names(answers: RememberedAnswers, tenant: str = "a") -> str:
    """Return the names of the tenant's answers that are there."""
    answers.check()
    keys = {it: key(tenant, it) for it in "123456789"}
    return "".join(it for it, key in keys.items() if answers.behind(key.namespace, key.before))


def add(answers: RememberedAnswers, tenant: str, name: str) -> None:
    answers.add(key(tenant, name), Remembered(array("I", [7] * 100), tenant.encode() * 32))


def test_the_answer_that_was_used_longest_ago_goes_first() -> None:
    answers = RememberedAnswers(3 * SIZE, Time())
    for name in "123":
        add(answers, "a", name)
    answers.touch([key("a", "1"), key("a", "2"), key("a", "9")])
    add(answers, "a", "4")
    assert names(answers) == "124"
    add(answers, "a", "5")
    assert names(answers) == "145", "of one conversation the later answers go first"
    assert answers.figures == (3, 3 * SIZE)
    answers.add(key("a", "6"), Remembered(array("I", [7] * 2000), b""))
    assert names(answers) == "", "it fits beside no other, and not by itself"


def test_a_tenant_with_less_than_an_equal_share_loses_nothing_to_others() -> None:
    answers = RememberedAnswers(4 * SIZE, Time())
    add(answers, "b", "1")
    for name in "123456789":
        add(answers, "a", name)
    assert (names(answers, "a"), names(answers, "b")) == ("789", "1")


def test_answers_go_by_eviction_and_with_their_key() -> None:
    time = Time()
    answers = RememberedAnswers(9 * SIZE, time)
    for tenant, name in ("a1", "a2", "b3"):
        add(answers, tenant, name)
        time.now_s += 10
    answers.touch([key("a", "1")])
    assert answers.evict(EvictFilter(ids=("0" * 8,))) == 0
    assert answers.evict(EvictFilter(all=True, dry_run=True)) == 3
    assert answers.evict(EvictFilter(older_than_s=15)) == 1
    assert names(answers) == "1"
    assert answers.evict(EvictFilter(namespace_prefix=b"a".hex())) == 1
    assert (names(answers), names(answers, "b")) == ("", "3")
    add(answers, "a", "1")
    answers.keep_tenants(lambda tenant: tenant == "a")
    assert (names(answers), names(answers, "b")) == ("1", "")


def test_nothing_is_remembered_for_a_key_that_was_removed() -> None:
    session = Session()
    session.memory = Memory(session.answers, NAMESPACE, b"", lambda tenant: tenant != "a")
    session.answer(session.encode(ASKED), [*sampled("Cold.", 1), END])
    assert session.answers.figures == (0, 0)


def test_each_answer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = Counter[str](), Writing.read

    def counted(self: Writing, begun: str, text: str, tools: Any) -> bytes:
        reads[text] += 1
        return read(self, begun, text, tools)

    monkeypatch.setattr(Writing, "read", counted)
    session, messages = Session(), [*ASKED]
    for i in range(40):
        reads.clear()
        encoded = session.encode(messages)
        assert reads.total() == min(i, 1), "the last one"
        reply = session.answer(encoded, [*sampled(f"It is {i}.", i), END])
        messages += [message_of(reply), *ASKED]
