"""What the server accepts, what it refuses and in which words, tested without an engine."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.golden import refused
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import (
    Claim,
    EngineInfo,
    EngineRequest,
    RequestUsage,
    TokenLogprob,
)
from tieredkv.engine.prompt import pack_prompt
from tieredkv.engine.sampling_params import SamplingParams, TokenChoice
from tieredkv.errors import ConfigError, RequestError
from tieredkv.fields import parse_body, read
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS
from tieredkv.server import openai_api as requests
from tieredkv.server.asked import WHOLE, Rules, fitted
from tieredkv.server.chat import Tokenization
from tieredkv.server.openai_answers import NO_ECHO, ChatShape, CompletionShape
from tieredkv.server.reply import Reply
from tieredkv.server.response_answers import ResponseShape
from tieredkv.server.responses_api import ResponsesRequest
from tieredkv.server.run import bind
from tieredkv.types import Tier

RULES = Rules(Settings(disk_dir="kv"), is_strict=False)
INFO = EngineInfo(model="m", max_model_len=64, vocab_size=9, block_size=16, worker_pid=None)
TOKENIZER = load_tokenizer("tiny-random")
TOKENIZATION = Tokenization(TOKENIZER)
USER = {"role": "user", "content": "hi"}


def completion(*, is_strict: bool = False, **fields: Any) -> requests.CompletionRequest:
    rules = Rules(Settings(), is_strict=is_strict)
    body = {"model": "m", "prompt": "a", **fields}
    asked = read(requests.CompletionRequest, body, rules.refuses)
    asked.check(rules)
    return asked


def chat(*messages: object, rules: Rules = RULES, **fields: Any) -> requests.ChatRequest:
    body = {"model": "m", "messages": list(messages), **fields}
    asked = read(requests.ChatRequest, body, rules.refuses)
    asked.check(rules)
    return asked


REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"temperature": 100.5}, "temperature", "decimal_above_max_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "array_above_max_length"),
    ({"stop": [1]}, "stop", "invalid_type"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [1, True]}, "prompt", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "empty_string"),
    ({"prompt": [1.5]}, "prompt", "invalid_type"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED_COMPLETIONS)
def test_a_bad_value_is_refused_in_the_words_of_openai(
    fields: dict[str, Any], param: str, code: str
) -> None:
    with refused(RequestError, param=param, code=code, status=400):
        completion(**fields)


BEYOND_OPENAI: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"n": 2, "best_of": 2}, "best_of"),
]


@pytest.mark.parametrize(("fields", "param"), BEYOND_OPENAI)
def test_what_agents_send_beyond_openais_limits_is_taken_unless_the_server_is_strict(
    fields: dict[str, Any], param: str
) -> None:
    chat(USER, **fields)
    with refused(RequestError, param=param):
        chat(USER, rules=replace(RULES, is_strict=True), **fields)


def test_what_is_taken_beyond_openais_limits_has_its_effect() -> None:
    stop = [*"abcdefghijklmnop"]
    asked = chat(USER, temperature=100, stop=stop, logprobs=True, top_logprobs=100)
    params = asked.params
    assert (params.temperature, params.stop, params.logprobs) == (100, tuple(stop), 100)
    for rules in (RULES, replace(RULES, is_strict=True)):
        with refused(RequestError, param="top_logprobs", code="integer_above_max_value"):
            chat(USER, rules=rules, logprobs=True, top_logprobs=101)


def test_a_value_of_metadata_that_is_no_text_is_no_label() -> None:
    asked = chat(USER, metadata={"route": "a", "size": 5, "of": {"b": None}})
    assert asked.ask(TOKENIZATION, RULES).labels == {"route": "a"}


REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    *(
        (
            {"messages": [USER], "chat_template_kwargs": {name: value}},
            f"chat_template_kwargs.{name}",
        )
        for name, value in (
            ("chat_template", "{{ 1 }}"),
            ("messages", "a"),
            ("tools", "a"),
            ("documents", [1]),
            ("add_generation_prompt", False),
            ("return_assistant_tokens_mask", True),
        )
    ),
    *(
        ({"messages": [USER], "chat_template_kwargs": {"a": value}}, "chat_template_kwargs.a")
        for value, got in (([1], "an array"), ({"b": 1}, "an object"))
    ),
]


@pytest.mark.parametrize(("body", "param"), REFUSED_CHATS)
def test_a_bad_conversation_is_refused_and_the_place_is_named(
    body: dict[str, Any], param: str
) -> None:
    with refused(RequestError, param=param):
        chat(*body["messages"], **{name: body[name] for name in body if name != "messages"})


BROKEN_BODIES = [b"", b"{", b"\xff", b"{1:2}", b"NaN"]


@pytest.mark.parametrize("body", BROKEN_BODIES, ids=range(len(BROKEN_BODIES)))
def test_a_body_that_is_no_json_is_refused_in_one_sentence(body: bytes) -> None:
    with refused(RequestError):
        parse_body(body)


SURROGATES = [
    (rb'{"a": "\ud83d"}', "\ufffd"),
    (rb'{"a": "\uD83D\uDE42"}', "\U0001f642"),
    (rb'{"a": "x\udc00y\ud83d\ud83d\ude42"}', "x\ufffdy\ufffd\U0001f642"),
    (rb'{"a": "\\ud83d\ud83d"}', "\\ud83d\ufffd"),
    (b'{"a": "\xed\xa0\xbd"}', "\ufffd"),
    (b'{"a": "\xed\xa0\xbd\xed\xb9\x82"}', "\U0001f642"),
]


@pytest.mark.parametrize(("body", "text"), SURROGATES, ids=range(len(SURROGATES)))
def test_half_of_a_surrogate_pair_is_replaced_and_a_whole_pair_is_kept(
    body: bytes, text: str
) -> None:
    assert parse_body(body) == {"a": text}
    key = body.replace(b'{"a": ', b"{").replace(b"}", b": 1}")
    assert parse_body(key) == {text: 1}


def test_a_variable_of_the_template_that_is_null_is_not_there() -> None:
    asked = chat(USER, chat_template_kwargs={"enable_thinking": None, "tools": None, "mood": "a"})
    assert asked.chat_template_kwargs == {"mood": "a"}


GUIDED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": 5}, "guided_regex", "invalid_type"),
    ({"guided_regex": "(?!a)b"}, "guided_regex", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "empty_array"),
    ({"guided_choice": ["a", 5]}, "guided_choice", "invalid_type"),
    ({"guided_grammar": "root"}, "guided_grammar", "invalid_value"),
    ({"guided_json": {"type": "nothing"}}, "guided_json", "invalid_json_schema"),
    ({"guided_json": "{"}, "guided_json", "invalid_json_schema"),
]


@pytest.mark.parametrize(("fields", "param", "code"), GUIDED)
def test_a_wrong_guided_field_is_named_as_the_client_named_it(
    fields: dict[str, Any], param: str, code: str
) -> None:
    with refused(RequestError, param=param, code=code):
        _ = chat(USER, **fields).text_format


def test_every_form_of_prompt_becomes_a_list_of_prompts() -> None:
    forms: list[tuple[object, list[object]]] = [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ]
    for prompt, expected in forms:
        assert completion(prompt=prompt).prompt == expected


def test_null_is_the_same_as_absent_and_unknown_fields_are_ignored() -> None:
    names = ["max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs"]
    nothing: dict[str, Any] = dict.fromkeys(names)
    given = completion(**nothing, of_tomorrow=1)
    assert given.params == completion().params
    assert given.model_dump(exclude={"of_tomorrow"}) == completion().model_dump()


def test_a_strict_server_takes_every_field_that_says_how_to_sample() -> None:
    asked = completion(
        is_strict=True, temperature=0.5, top_k=3, logit_bias={"7": 1}, ignore_eos=True
    )
    params = asked.params
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 3, {7: 1.0})
    assert params.ignore_eos
    assert completion(top_p=0, temperature=1.5).params.temperature == 0.0
    with refused(RequestError, param="temperature", code="decimal_above_max_value"):
        completion(top_p=0, temperature=100.5)


def test_how_to_sample_is_left_to_the_model_where_a_request_does_not_say() -> None:
    params = completion(top_p=None, temperature=None).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (None,) * 4
    assert params.repetition_penalty is None
    recommended = TokenChoice(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    assert params.choice(recommended) == recommended
    chosen = completion(temperature=1.0, top_p=1.0).params.choice(recommended)
    assert chosen == TokenChoice(top_k=20, repetition_penalty=1.05)


def test_a_logit_bias_of_too_many_tokens_is_refused_as_an_object() -> None:
    with refused(RequestError, param="logit_bias", code="object_above_max_length"):
        completion(logit_bias={str(token): 1 for token in range(1025)})


def test_a_strict_server_refuses_unknown_fields_and_other_spellings() -> None:
    with refused(RequestError, param="of_tomorrow", code="unknown_parameter"):
        completion(is_strict=True, of_tomorrow=1)
    with refused(RequestError, param="prompt_cache_retention", code="invalid_value"):
        completion(is_strict=True, prompt_cache_retention="in-memory")
    completion(prompt_cache_retention="in-memory")


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(USER, max_tokens=5, max_completion_tokens=7).limit == 7
    assert chat(USER, max_tokens=5).limit == 5
    assert chat(USER).limit is None


def test_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    def seeds(**fields: Any) -> list[int | None]:
        asked = completion(**fields)
        shape = CompletionShape(asked.model, TOKENIZATION, **asked.form)
        whole = asked.asked([[1], [2]], asked.plan(RULES, []), shape=shape)
        return [it.params.seed for it in whole.engine_requests(INFO, "tenant", RULES)]

    assert seeds(seed=7, n=3) == [7, 8, 9] * 2
    assert seeds(seed=2**63 - 1, n=2) == [2**63 - 1, 0] * 2
    assert seeds(n=2) == [None] * 4, "the engine draws one for each"


def test_an_answer_has_all_the_room_unless_the_api_says_less() -> None:
    assert (chat(USER).params.max_tokens, completion().params.max_tokens) == (WHOLE, 16)
    assert completion(max_tokens=10**30).params.max_tokens == WHOLE
    assert completion(min_tokens=50).params.min_tokens == 16
    with refused(RequestError, param="min_tokens", code="integer_above_max_value"):
        completion(max_tokens=5, min_tokens=7)


def test_messages_take_the_form_that_templates_know() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    function = {"name": "f", "arguments": '{"x": 1}'}
    asked = chat(
        {"role": "developer", "content": parts},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    )
    parsed = {"name": "f", "arguments": {"x": 1}}
    assert [message.for_template() for message in asked.messages] == [
        {"role": "system", "content": ["a", "b"]},
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [{"id": "c1", "type": "function", "function": parsed}],
        },
        {"role": "tool", "content": ["1"], "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([], "invalid_value"), ([1] * 8, "context_length_exceeded"), ([9], "invalid_value")],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt: list[int], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        pack_prompt(prompt, 8, 9)
    assert (caught.value.code, caught.value.param) == (code, "prompt")


def test_a_prompt_that_leaves_room_for_what_is_wanted_is_served() -> None:
    pack_prompt([1] * 7, 8, 9)
    pack_prompt([1] * 8, 8, 9, max_tokens=0)
    asked: dict[str, Any] = {"prompt": [1] * INFO.max_model_len, "echo": True}
    for max_tokens, is_fine in ((0, True), (1, False)):
        body = completion(**asked, max_tokens=max_tokens)
        whole = body.ask(TOKENIZATION, RULES)
        with contextlib.nullcontext() if is_fine else pytest.raises(RequestError):
            assert len(whole.engine_requests(INFO, "", RULES)) == 1


PLANS: list[tuple[dict[str, Any], list[Any], list[tuple[int, str, float]], int | None]] = [
    # The cache fields, the lifetimes of breakpoints; the claims, and how many tokens are cached.
    ({}, [], [], None),
    ({"prompt_cache_retention": "24h"}, [], [], None),
    ({"prompt_cache_options": {}}, [], [(WHOLE, "in_memory", 1800)], None),
    ({"prompt_cache_options": {"ttl": "30m"}}, [], [(WHOLE, "in_memory", 1800)], None),
    ({"prompt_cache_options": {"ttl": "12h"}}, [], [(WHOLE, "24h", 43200)], None),
    (
        {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"},
        [],
        [(WHOLE, "24h", 1800)],
        None,
    ),
    ({"prompt_cache_options": {"mode": "explicit"}}, [], [], 0),
    ({"prompt_cache_options": {"mode": "explicit"}}, [None], [(10, "in_memory", 1800)], 10),
    (
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
        ["30m", None],
        [(10, "in_memory", 1800), (20, "24h", 43200)],
        20,
    ),
    ({}, ["12h"], [(10, "24h", 43200)], None),
    (
        {},
        [None] * 5,
        [(30, "in_memory", 1800), (40, "in_memory", 1800), (50, "in_memory", 1800)],
        None,
    ),
    (
        {"prompt_cache_options": {"mode": "explicit"}},
        [None] * 5,
        [(end, "in_memory", 1800) for end in (20, 30, 40, 50)],
        50,
    ),
]


@pytest.mark.parametrize(("fields", "ttls", "claims", "cacheable"), PLANS)
def test_the_cache_fields_of_a_request_become_a_plan(
    fields: dict[str, Any],
    ttls: list[Any],
    claims: list[tuple[int, str, float]],
    cacheable: int | None,
) -> None:
    parts = [
        {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
        for _ in ttls
    ]
    for part, ttl in zip(parts, ttls, strict=True):
        part["prompt_cache_breakpoint"] |= {"ttl": ttl}  # type: ignore[operator]
    messages = [{"role": "user", "content": [part]} for part in parts or [{**PART}]]
    asked = read(ResponsesRequest, {"model": "m", "input": messages, **fields}, RULES.refuses)
    asked.check(RULES)
    # Only the last four breakpoints count, as many as a request may write.
    plan = asked.plan(RULES, [10 * (i + 1) for i in range(len(ttls))][-4:])
    assert [(it.end_token, it.retention, it.pin_s) for it in plan.claims] == claims
    assert plan.cacheable_tokens == cacheable
    assert plan.retention == fields.get("prompt_cache_retention")


PART = {"type": "input_text", "text": "a"}


def test_a_lifetime_that_no_policy_reaches_is_refused_with_the_supported_ones() -> None:
    body = {"model": "m", "input": "a", "prompt_cache_options": {"ttl": "12h"}}
    only_memory = Settings(disk_dir="kv", max_retention="in_memory")
    for settings in (Settings(), only_memory):
        rules = Rules(settings, is_strict=False)
        with refused(
            RequestError, param="prompt_cache_options.ttl", code="invalid_value"
        ) as caught:
            read(ResponsesRequest, body).check(rules)
        assert (caught.value.param, caught.value.code) == (
            "prompt_cache_options.ttl",
            "invalid_value",
        )
    in_memory = replace(TWENTY_FOUR_HOURS, tiers=IN_MEMORY.tiers)
    read(ResponsesRequest, body).check(Rules(Settings(policies=(IN_MEMORY, in_memory))))


@pytest.mark.parametrize(
    ("cacheable", "length", "kept"),
    [(None, 1024, None), (None, 1023, 0), (1024, 2000, 1024), (1023, 2000, 0), (0, 2000, 0)],
)
def test_a_prefix_below_the_minimum_is_not_cached(
    cacheable: int | None, length: int, kept: int | None
) -> None:
    rules = Rules(Settings(min_cache_tokens=1024), is_strict=False)
    claims = [Claim(end_token=WHOLE, retention="24h", pin_s=1.0)]
    plan = EngineRequest(params=SamplingParams(), claims=claims, cacheable_tokens=cacheable)
    request = fitted(plan, [1] * length, 16, rules)
    assert request.cacheable_tokens == kept
    ends = [] if kept == 0 else [WHOLE - WHOLE % 16]
    assert [claim.end_token for claim in request.claims] == ends
    assert fitted(EngineRequest(params=SamplingParams()), [1], 16, RULES).cacheable_tokens is None
    if kept != 0:
        [claim] = fitted(plan, [1] * length, 64, rules).claims
        assert claim.end_token == WHOLE - WHOLE % 64


def test_answers_to_several_prompts_become_requests_with_plans_of_their_own() -> None:
    asked = completion(prompt=[[1] * 20, [2] * 40], n=2, seed=5, prompt_cache_options={})
    plan = asked.plan(RULES, [])
    shape = CompletionShape(asked.model, TOKENIZATION, **asked.form)
    whole = asked.asked([[1] * 20, [2] * 40], plan, shape=shape)
    made = whole.engine_requests(INFO, "tenant", RULES)
    assert [claim.end_token for each in made for claim in each.claims] == [WHOLE - WHOLE % 16] * 4
    assert [each.params.seed for each in made] == [5, 6, 5, 6]
    assert {each.tenant for each in made} == {"tenant"}
    assert len({each.request_id for each in made}) == 4


@pytest.mark.parametrize(("code", "told_code"), [("x", "x"), (None, "server_error")])
def test_a_stream_of_responses_that_fails_ends_with_an_event_of_its_own(
    code: str | None, told_code: str
) -> None:
    shape = ResponseShape({}, {}, is_prewarm=False)
    assert len(shape.waiting()) == 2
    [event] = shape.failure(RequestError("Stopping", code=code))
    assert (event["type"], event["sequence_number"]) == ("response.failed", 2)
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": told_code, "message": "Stopping"}


def test_a_strict_server_refuses_unknown_fields_wherever_they_stand() -> None:
    strict = Rules(Settings(), is_strict=True)
    inside: list[tuple[dict[str, Any], str]] = [
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt_cache_options": {"x": 1}}, "prompt_cache_options.x"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
            "tools[0].function.x",
        ),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
    ]
    for fields, path in inside:
        body = {"model": "m", "messages": [USER], **fields}
        with refused(RequestError) as caught:
            read(requests.ChatRequest, body, strict.refuses)
        assert (caught.value.param, caught.value.code) == (path, "unknown_parameter")
        read(requests.ChatRequest, body, RULES.refuses)


def test_items_sent_back_to_a_strict_server_are_used_except_reasoning() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    items: list[dict[str, Any]] = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {**answer, "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}]},
        {**call, "status": "completed"},
        {"type": "function_call_output", "output": "done"},
    ]
    strict = replace(RULES, is_strict=True)
    asked = read(ResponsesRequest, {"model": "m", "input": items}, strict.refuses)
    told = [message.for_template() for _, message in asked.turns]
    assert [each["role"] for each in told] == ["user", "assistant", "tool"]
    assert [call["function"]["name"] for call in told[1]["tool_calls"]] == ["f"]
    chat(USER, {"role": "assistant", "content": "a", "annotations": []}, rules=strict)


MARK = {"mode": "explicit"}


@pytest.mark.parametrize(
    "part", [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "a"}]
)
def test_a_part_of_an_answer_has_no_breakpoint(part: dict[str, Any]) -> None:
    def ask(**mark: Any) -> None:
        turns = [{"role": "assistant", "content": [part | mark]}, USER]
        read(ResponsesRequest, {"model": "m", "input": turns}, RULES.refuses)

    ask()
    with refused(
        RequestError,
        param="input[0].content[0].prompt_cache_breakpoint",
        code="unsupported_parameter",
    ):
        ask(prompt_cache_breakpoint=MARK)


def test_a_refused_lifetime_of_a_breakpoint_names_its_own_field() -> None:
    rules, mark = Rules(Settings()), {"prompt_cache_breakpoint": MARK | {"ttl": "12h"}}
    output = {"type": "function_call_output", "call_id": "c", "output": [PART, PART | mark]}
    turns = [USER, {"type": "function_call", "call_id": "c", "name": "f"}, output]
    with refused(
        RequestError, param="input[2].output[1].prompt_cache_breakpoint.ttl", code="invalid_value"
    ) as caught:
        read(ResponsesRequest, {"model": "m", "input": turns}).check(rules)
    assert caught.value.param == "input[2].output[1].prompt_cache_breakpoint.ttl"
    with pytest.raises(RequestError) as caught:
        chat({**USER, "content": [{"type": "text", "text": "a", **mark}]}, rules=rules)
    assert caught.value.param == "messages[0].content[0].prompt_cache_breakpoint.ttl"


def test_only_responses_are_prewarmed() -> None:
    options: dict[str, Any] = {"prompt_cache_options": {"prewarm": True}}
    assert read(ResponsesRequest, {"model": "m", "input": "a", **options}).is_prewarm
    for ask in (completion, lambda **fields: chat(USER, **fields)):
        with refused(
            RequestError, param="prompt_cache_options.prewarm", code="unknown_parameter"
        ) as caught:
            ask(**options)
        assert caught.value.param == "prompt_cache_options.prewarm"


def test_json_is_as_deep_as_is_allowed_and_no_deeper() -> None:
    for depth, is_fine in ((64, True), (65, False), (900, False), (100_000, False)):
        body = b'{"a":' * depth + b"1" + b"}" * depth
        if is_fine:
            parse_body(body)
            continue
        with refused(RequestError):
            parse_body(body)
    parse_body(b'{"prompt":[' + b"[1]," * 1000 + b"[1]]}")


def test_usage_sums_the_tiers_and_counts_each_prompt_once() -> None:
    usages = [
        RequestUsage(
            prompt_tokens=40,
            cached_tokens_by_tier={Tier.DEVICE: 16, Tier.HOST: 0, Tier.DISK: 16},
            written_tokens=8,
        ),
        RequestUsage(
            prompt_tokens=20,
            cached_tokens_by_tier={Tier.DEVICE: 0, Tier.HOST: 16, Tier.DISK: 0},
            recomputed_tokens=4,
            split_token=16,
            predicted_s=0.25,
            actual_s=0.3000004,
        ),
    ]
    answers = [Reply(EngineRequest(params=SamplingParams()), TOKENIZER) for _ in range(4)]
    for i, answer in enumerate(answers):
        answer.usage, answer.finish_reason, answer.token_ids = usages[i // 2], "length", [97] * i
    told = CompletionShape("m", TOKENIZATION, [NO_ECHO] * 2, n=2).whole(answers)
    assert told["usage"] == {
        "prompt_tokens": 60,
        "completion_tokens": 6,
        "total_tokens": 66,
        "prompt_tokens_details": {
            "cached_tokens": 48,
            "cache_write_tokens": 8,
            "cached_tokens_by_tier": {"device": 16, "host": 16, "disk": 16},
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
        "tieredkv": {
            "device": 16,
            "host": 16,
            "disk": 16,
            "recomputed": 4,
            "plan": {"split_token": 16, "predicted_ms": 250.0, "actual_ms": 300.0},
        },
    }


def test_logprobs_have_the_shape_of_their_endpoint_and_no_infinity() -> None:
    tokens = [
        TokenLogprob(token_id=97, logprob=-0.5, top=[(97, -0.5), (98, float("-inf"))]),
        TokenLogprob(token_id=233, logprob=-1.0),
    ]
    shape = CompletionShape("m", TOKENIZATION, [("abc", [])])
    assert shape.logprobs(tokens, 0) == {
        "tokens": ["a", "bytes:\\xe9"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, {"bytes:\\xe9": -1.0}],
        "text_offset": [3, 4],
    }
    content = ChatShape("m", TOKENIZATION).logprobs(tokens, 0)["content"]
    assert content[0]["bytes"] == [97]
    assert content[0]["top_logprobs"][1] == {"token": "b", "logprob": -9999.0, "bytes": [98]}
    assert (content[1]["token"], content[1]["bytes"]) == ("\N{REPLACEMENT CHARACTER}", [233])


def test_offsets_of_tokens_are_places_in_the_text() -> None:
    asked = completion(prompt="H\u00e9\u00e9 x", echo=True, logprobs=0, n=2, max_tokens=4)
    shape: Any = asked.ask(TOKENIZATION, RULES).shape
    scores = [(72, None), *((each, -1.0) for each in b"\xc3\xa9\xc3\xa9 x\xe2\x98")]
    first = [TokenLogprob(token_id=id, logprob=logprob) for id, logprob in scores]
    expected = [0, 1, 1, 2, 2, 3, 4, 5, 5]
    assert [shape.logprobs(first, i)["text_offset"] for i in (0, 1)] == [expected] * 2
    last = [TokenLogprob(token_id=id, logprob=-1.0) for id in b"\x83!"]
    told = [shape.logprobs([token], 1) for token in last]  # one token at a time
    assert [each["text_offset"] for each in told] == [[5], [6]]


def test_different_tokens_have_different_names_though_none_has_a_text() -> None:
    top = [(0xC3, -1.0), (0xE2, -2.0), (0xF0, -3.0)]
    token = TokenLogprob(token_id=0xC3, logprob=-1.0, top=top)
    [told] = CompletionShape("m", TOKENIZATION).logprobs([token], 0)["top_logprobs"]
    assert told == {"bytes:\\xc3": -1.0, "bytes:\\xe2": -2.0, "bytes:\\xf0": -3.0}


def test_a_token_put_before_a_text_starts_where_the_text_starts() -> None:
    ids = [256, *b"ab"]
    for text, starts in (("ab", [0, 0, 1]), ("<|bos|>ab", [0, 7, 8])):
        assert TOKENIZATION.starts(ids, text) == starts


def test_tokens_of_byte_fallback_report_their_bytes() -> None:
    vocabulary = {"<0xC3>": 0, "<0xA9>": 1, "a": 2, "\N{REPLACEMENT CHARACTER}": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    make: Any = PreTrainedTokenizerFast
    tokenization = Tokenization(make(tokenizer_object=backend))
    told = [tokenization.token(id).encoded for id in range(4)]
    assert told == [b"\xc3", b"\xa9", b"a", "\N{REPLACEMENT CHARACTER}".encode()]


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('take turns') }}", "{{ messages | dictsort }}"]
)
def test_a_missing_or_failing_chat_template_is_a_request_error(template: str | None) -> None:
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = template
    tokenization = Tokenization(tokenizer)
    with refused(RequestError):
        tokenization.encode_chat([USER], {})


def test_an_open_address_needs_a_key_or_a_flag() -> None:
    with refused(ConfigError):
        bind(Settings(host="0.0.0.0", port=0), allows_open_access=False)
    for settings, allows in (
        (Settings(host="0.0.0.0", port=0), True),
        (Settings(host="0.0.0.0", port=0, api_keys=("k",)), False),
        (Settings(host="localhost", port=0), False),
    ):
        bind(settings, allows_open_access=allows).close()


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with bind(Settings(port=0), allows_open_access=False) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with refused(ConfigError, hide={str(port): "PORT"}):
            bind(Settings(port=port), allows_open_access=False)


def test_the_operators_policies_are_the_supported_values() -> None:
    only_memory = Rules(Settings(max_retention="in_memory"), is_strict=False)
    with refused(RequestError, param="prompt_cache_retention", code="invalid_value"):
        completion(prompt_cache_retention="24h").check(only_memory)
