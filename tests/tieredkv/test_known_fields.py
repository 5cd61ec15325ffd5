"""No field that changes an answer is ignored, except the few named in docs/server.md."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_message_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.golden import told
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineRequest, RequestUsage
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.fields import Object, names_of, read
from tieredkv.server.anthropic_answers import anthropic_body
from tieredkv.server.anthropic_api import CountTokensRequest, MessagesRequest
from tieredkv.server.asked import ApiRequest, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.generation import Piece
from tieredkv.server.known_fields import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
    KnownFields,
)
from tieredkv.server.message_parser import Delta
from tieredkv.server.openai_answers import ChatShape
from tieredkv.server.openai_api import ChatRequest, CompletionRequest
from tieredkv.server.reply import Reply
from tieredkv.server.responses_api import ResponsesRequest
from tieredkv.server.tokenize_requests import TokenizeRequest

USER = {"role": "user", "content": "hi"}
NEEDED: dict[type[ApiRequest], dict[str, Any]] = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": [USER], "max_tokens": 4},
    CountTokensRequest: {"messages": [USER]},
    TokenizeRequest: {"messages": [USER]},
}
TABLES: dict[type[ApiRequest], KnownFields] = {
    ChatRequest: CHAT,
    CompletionRequest: COMPLETIONS,
    ResponsesRequest: RESPONSES,
    MessagesRequest: MESSAGES,
    CountTokensRequest: COUNT_TOKENS,
}
OPENAI = (ChatRequest, CompletionRequest, ResponsesRequest)
RULES, STRICT = (Rules(Settings(disk_dir="kv"), is_strict=each) for each in (False, True))


def take(kind: type[ApiRequest], rules: Rules = RULES, **fields: Any) -> ApiRequest:
    """Read and check a body with these fields."""
    body = read(kind, {"model": "m", **NEEDED[kind], **fields}, rules.refuses)
    body.check(rules)
    return body


def refusal(kind: type[ApiRequest], *, is_lenient: bool = False, **fields: Any) -> RequestError:
    """Return the error for these fields, which a strict server refuses, and mostly any other."""
    for rules in (STRICT, *([] if is_lenient else [RULES])):
        with pytest.raises(RequestError) as caught:
            take(kind, rules, **fields)
        assert caught.value.status == 400
    return caught.value


def known(kind: type[Object]) -> set[str]:
    return {*kind.model_fields, *kind.known_besides, *kind.refused}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_field_of_the_tables_is_refused_where_it_asks_for_something(
    kind: type[ApiRequest],
) -> None:
    table = TABLES[kind]
    assert len(table.refused) > 80
    for name, each in table.refused.items():
        error = refusal(kind, is_lenient=each.is_lenient, **{name: "asked for"})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert f"'{name}'" in str(error) and str(error).endswith(each.way_out)
        take(kind, STRICT, **{name: None})


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_a_field_is_one_of_harmless_ignored_and_refused(kind: type[ApiRequest]) -> None:
    table = TABLES[kind]
    names = [*table.harmless, *table.ignored, *table.refused]
    assert len(names) == len(set(names))
    value = {"any": ["value"]}
    for name in (table.harmless | table.ignored) - kind.model_fields.keys():
        take(kind, STRICT, **{name: value})
    for name in table.hosted:
        take(kind, RULES, **{name: value})


def test_ways_out_are_complete_sentences() -> None:
    for table in TABLES.values():
        for name, each in table.refused.items():
            assert re.fullmatch(r"([A-Z].*[.])?", each.way_out), name


ASKS_FOR_NOTHING: list[tuple[type[ApiRequest], dict[str, Any]]] = [
    *((kind, {"response_format": {"type": "text"}}) for kind in OPENAI),
    *((kind, {"guided_json": None, "structured_outputs": {}}) for kind in OPENAI),
    *(
        (kind, {"best_of": 1, "n": 1, "length_penalty": 1.0, "early_stopping": False})
        for kind in OPENAI
    ),
    *(
        (kind, {"use_beam_search": False, "bad_words": [], "logits_processors": []})
        for kind in OPENAI
    ),
    *((kind, {"skip_special_tokens": True, "detokenize": True}) for kind in OPENAI),
    *((kind, {"include_reasoning": True, "add_generation_prompt": True}) for kind in OPENAI),
    *((kind, {"repeat_penalty": 1, "typical_p": 1.0, "mirostat": 0}) for kind in OPENAI),
    *((kind, {"kv_transfer_params": {}, "documents": []}) for kind in OPENAI),
    (ChatRequest, {"tool_choice": "auto", "modalities": ["text"], "functions": [], "echo": False}),
    (ChatRequest, {"tool_choice": "none", "prediction": {"type": "content", "content": "a"}}),
    (ChatRequest, {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
    (ChatRequest, {"best_of": 1}),
    (CompletionRequest, {"suffix": "", "best_of": 2, "n": 2, "add_special_tokens": True}),
    (ResponsesRequest, {"text": {"format": {"type": "text"}}, "top_logprobs": 0}),
    (ResponsesRequest, {"background": False, "include": ["reasoning.encrypted_content"]}),
    (ResponsesRequest, {"store": True, "truncation": "auto", "max_tool_calls": 3}),
    (MessagesRequest, {"tool_choice": {"type": "auto"}, "mcp_servers": []}),
    (MessagesRequest, {"output_config": {"effort": "low", "format": None}}),
    (MessagesRequest, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    (MessagesRequest, {"context_management": {"edits": []}, "container": None}),
    (CountTokensRequest, {"compaction": {"type": "any"}}),
]


@pytest.mark.parametrize(("kind", "fields"), ASKS_FOR_NOTHING)
def test_values_that_ask_for_nothing_are_taken(
    kind: type[ApiRequest], fields: dict[str, Any]
) -> None:
    take(kind, STRICT, **fields)


ASKS_FOR_MORE: list[tuple[type[ApiRequest], dict[str, Any], str]] = [
    (CompletionRequest, {"tool_choice": "required"}, "tool_choice"),
    (ChatRequest, {"modalities": ["text", "audio"]}, "modalities"),
    (ChatRequest, {"skip_special_tokens": False}, "skip_special_tokens"),
    (ChatRequest, {"skip_special_tokens": 1}, "skip_special_tokens"),
    (ChatRequest, {"add_generation_prompt": False}, "add_generation_prompt"),
    (ChatRequest, {"prompt_logprobs": 0}, "prompt_logprobs"),
    (ChatRequest, {"length_penalty": 0}, "length_penalty"),
    (ChatRequest, {"enable_thinking": False}, "enable_thinking"),
    (ChatRequest, {"messages": [USER | {"prefix": True}]}, "messages[0].prefix"),
    (ResponsesRequest, {"max_tokens": 5}, "max_tokens"),
    (ResponsesRequest, {"include": ["message.output_text.logprobs"]}, "include"),
    (ResponsesRequest, {"n": 2}, "n"),
    (TokenizeRequest, {"chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
def test_only_a_strict_server_refuses_a_recording_of_the_assistant(kind: type[ApiRequest]) -> None:
    turns = [USER, {"role": "assistant", "audio": {"id": "audio_1"}}, USER]
    error = refusal(kind, is_lenient=True, messages=turns)
    assert (error.param, error.code) == ("messages[1].audio", "unsupported_parameter")
    told(str(error))
    take(kind, RULES, messages=turns)


@pytest.mark.parametrize(("kind", "fields", "param"), ASKS_FOR_MORE)
def test_values_that_ask_for_more_are_refused_and_the_place_is_named(
    kind: type[ApiRequest], fields: dict[str, Any], param: str
) -> None:
    error = refusal(kind, **fields)
    assert (error.param, error.code) == (param, "unsupported_parameter")


def test_a_refusal_says_the_way_out_in_the_form_of_each_api() -> None:
    error = refusal(ResponsesRequest, conversation="conv_1")
    assert (error.param, error.code) == ("conversation", "unsupported_parameter")
    told(str(error))
    body = anthropic_body(refusal(MessagesRequest, stop=["a"]), "req_1")
    assert body["error"]["type"] == "invalid_request_error"
    told(body["error"]["message"])


def test_a_refused_thread_tells_the_tool_runner_to_send_whole_conversations() -> None:
    body = anthropic_body(refusal(MessagesRequest, thread={"type": "new"}), "req_1")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert body["error"]["details"] == details


def test_a_field_of_one_endpoint_is_known_to_the_others_of_its_api() -> None:
    everything = {name for kind in OPENAI for name in known(kind)}
    for kind in OPENAI:
        assert everything - known(kind) == set(), kind
    assert set(SamplingParams.__annotations__) - known(MessagesRequest) == set()


KNOWN_CLIENTS = {openai: (3, 57), anthropic: (2, 13)}


def test_every_field_of_the_real_apis_is_in_a_table() -> None:
    for client, newest in KNOWN_CLIENTS.items():
        if tuple(map(int, client.__version__.split(".")[:2])) > newest:
            pytest.skip(f"{client.__name__} {client.__version__} may have fields that came later")
    kinds: list[tuple[type[ApiRequest], Any]] = [
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (MessagesRequest, beta_message_params.MessageCreateParamsBase),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
        (CountTokensRequest, beta_count_params.MessageCountTokensParams),
    ]
    for kind, theirs in kinds:
        assert len(theirs.__annotations__) >= 10
        assert theirs.__annotations__.keys() - known(kind) == set(), kind


def test_what_other_servers_add_is_in_a_table() -> None:
    names = names_of("""
        guided_json guided_regex guided_choice guided_grammar structured_outputs
        continue_final_message add_generation_prompt chat_template documents include_reasoning
        return_tokens_as_token_ids return_token_ids bad_words best_of use_beam_search
        prompt_logprobs truncate_prompt_tokens allowed_token_ids detokenize skip_special_tokens
        spaces_between_special_tokens length_penalty early_stopping logits_processors mirostat
        grammar format regex ebnf json_schema lora_path priority kv_transfer_params
        mm_processor_kwargs vllm_xargs stop_token_ids min_tokens top_k repetition_penalty
        include_stop_str_in_output thinking_token_budget add_special_tokens request_id
        no_stop_trim stop_regex session_params separate_reasoning return_hidden_states
        typical_p dry_multiplier xtc_probability repeat_penalty n_predict cache_prompt samplers
        timings_per_token watermark top_n_tokens adapter_id ttl draft_model keep_alive options
        transforms provider
    """)
    for kind in (*OPENAI, MessagesRequest):
        assert names - known(kind) == set(), kind


CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "Bash", "description": "d", "input_schema": {}, "defer_loading": True}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "betas": ["interleaved-thinking-2025-05-14"],
    "messages": [USER, {"role": "system", "content": [], "output_config": {"effort": "low"}}, USER],
}
CODEX: dict[str, Any] = {
    "instructions": "i",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
    ],
    "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": {}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
AGENT: dict[str, Any] = {
    "messages": [
        USER,
        {"role": "assistant", "content": "a", "reasoning_content": "thoughts"},
        USER,
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "max_completion_tokens": 8192,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "high",
    "prompt_cache_key": "k",
}
GUIDELLM: dict[str, Any] = {
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "stop": None,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
VLLM_BENCH: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 8,
    "repetition_penalty": 1.0,
    "logprobs": None,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param(MessagesRequest, CLAUDE_CODE, id="Claude Code"),
        pytest.param(ResponsesRequest, CODEX, id="Codex CLI"),
        pytest.param(ChatRequest, AGENT, id="agents that chat"),
        pytest.param(ChatRequest, GUIDELLM, id="guidellm chats"),
        pytest.param(CompletionRequest, GUIDELLM, id="guidellm completes"),
        pytest.param(CompletionRequest, VLLM_BENCH, id="vllm bench"),
    ],
)
def test_what_agents_and_benchmarks_send_is_taken(
    kind: type[ApiRequest], fields: dict[str, Any]
) -> None:
    take(kind, STRICT, **fields)


def test_the_newer_name_of_the_longest_answer_goes_before_the_older_one() -> None:
    for kind in (ChatRequest, CompletionRequest):
        body: Any = take(kind, max_tokens=5, max_completion_tokens=7)
        assert body.params.max_tokens == 7, kind


def test_usage_is_in_every_chunk_where_it_is_wanted_and_counts_what_was_told() -> None:
    tokenizer = load_tokenizer("tiny-random")
    answers = [Reply(EngineRequest(params=SamplingParams()), tokenizer) for _ in range(2)]
    for answer in answers:
        answer.usage, answer.token_ids = RequestUsage(prompt_tokens=3), [97] * 5  # more than sent

    async def pieces() -> AsyncIterator[Piece]:
        for index, num_tokens in ((0, 1), (1, 2), (0, 5), (1, 5)):
            reason = "length" if num_tokens == 5 else None
            yield Piece(index, num_tokens, "a", [Delta("a")], None, reason)

    async def told(**how: Any) -> list[Any]:
        shape = ChatShape("m", Tokenization(tokenizer), n=2, **how)
        return [event.get("usage", "absent") async for event in shape.events(answers, pieces())]

    every = asyncio.run(told(usage_in="all"))
    assert [usage["completion_tokens"] for usage in every] == [0, 0, 1, 3, 7, 7, 10, 10, 10]
    assert {usage["prompt_tokens"] for usage in every} == {3}
    last = asyncio.run(told(usage_in="last"))
    assert last[:-1] == [None] * 8 and last[-1] == every[-1]
    assert set(asyncio.run(told(usage_in="none"))) == {"absent"}


def test_the_fields_that_are_ignored_are_few() -> None:
    assert CHAT.ignored == {"reasoning", "verbosity", "context_management"}
    assert RESPONSES.ignored == {"reasoning_effort", "verbosity", "context_management"}
    assert MESSAGES.ignored == {"context_management"}
