"""Fields of requests that this server knows and does not act on, in one table for each endpoint.

A field of a request is one of five things. It is *supported*, and then it is a field of the request
type. It is *harmless*: it changes no answer. It is *ignored*: it would change an answer, but agents
send it with every request; these are few, and docs/server.md names them. It is *hosted*: it asks
for what only a provider's servers offer, and is ignored unless the server is strict. Or it is
*refused* where its value asks for something: a client that relies on it must not be answered
without it.

Fields that are in none of these tables are unknown, and refused only with `--strict-params`. The
tables hold the fields of OpenAI's and Anthropic's APIs, and what vLLM, SGLang, TGI, llama.cpp,
LM Studio, Ollama and OpenRouter add to them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tieredkv.fields import Refusal, names_of, refusals


class KnownFields(NamedTuple):
    """The fields that an endpoint knows but does not act on.

    Attributes:
        harmless: fields that change no answer.
        ignored: fields that would change an answer, and are accepted without effect.
        refused: fields that are refused with a 400 unless their value asks for nothing.
    """

    harmless: frozenset[str]
    ignored: frozenset[str]
    refused: Mapping[str, Refusal]

    @property
    def hosted(self) -> frozenset[str]:
        """Those of the refused ones that a server which is not strict accepts without effect."""
        return frozenset(name for name, each in self.refused.items() if each.is_lenient)

    @property
    def always(self) -> frozenset[str]:
        """The refused ones that every server refuses."""
        return frozenset(self.refused) - self.hosted

    @property
    def without_effect(self) -> frozenset[str]:
        """Fields that have no effect if they are accepted."""
        return self.harmless | self.ignored | self.hosted


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a test for being one of these values; `True` and `1` are different values."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def never(_value: Any) -> bool:
    """Return False, so that a field is refused with any value except `null`."""
    return False


def number(*values: float) -> Callable[[Any], bool]:
    """Return a test for being one of these numbers, written as an integer or as a decimal."""
    return lambda value: type(value) in (int, float) and value in values


def is_plain_text(value: Any) -> bool:
    """Whether the wanted form of an answer is plain text."""
    return isinstance(value, dict) and value.get("type") == "text"


def has_no_logprobs(value: Any) -> bool:
    """Whether the list in an `include` field does not ask for log-probabilities."""
    return isinstance(value, list) and "message.output_text.logprobs" not in value


def _without(refused: Mapping[str, Refusal], names: str) -> dict[str, Refusal]:
    return {name: each for name, each in refused.items() if name not in names.split()}


# --- Advice in errors: complete sentences about what to do instead.

_FORMAT = "Use 'response_format' or 'structured_outputs'."
_OUTPUT_CONFIG = "Use 'output_config.format'."
_RENDER = "Render the conversation yourself and send it as the 'prompt' of /v1/completions."
_TOKENS = "Send the prompt as token ids to /v1/completions."
_ONE_MODEL = "Name the model in 'model'; each server has one, without adapters."
_NO_CONVERSATIONS = "Send its items in 'input', or continue a response: 'previous_response_id'."
_TEMPLATE = "Send it as 'chat_template_kwargs', where the model's template knows it."
_BIAS = "Use 'logit_bias' to rule tokens in or out."
_TOOLS = "Only tools that the client runs are supported: describe them in 'tools'."
_CHAT = "Use /v1/chat/completions for conversations."

STRUCTURED = refusals(
    "structural_tag regex ebnf grammar json_schema grammar_triggers format", _FORMAT
)

# --- Fields that other servers add to the APIs; no endpoint supports them.

_EXTENSIONS: dict[str, Refusal] = {
    **STRUCTURED,
    # How tokens are chosen.
    **refusals("use_beam_search early_stopping", "Use 'n' for several answers."),
    **refusals("length_penalty typical_p tfs_z", unless=number(1)),
    **refusals("mirostat dynatemp_range dry_multiplier xtc_probability watermark watermarking"),
    **refusals("top_n_sigma adaptive_target", unless=number(0, -1)),
    **refusals("top_a min_keep"),
    **refusals("repeat_penalty", "Use 'repetition_penalty' instead.", unless=number(1)),
    **refusals("samplers logits_processors custom_logit_processor custom_params"),
    **refusals("do_sample", "For greedy answers set 'temperature' to 0.", unless=one_of(True)),
    **refusals("bad_words bad_words_ids allowed_token_ids", _BIAS),
    **refusals("stop_regex", "Use 'stop' with plain texts."),
    **refusals(
        "n_predict max_new_tokens",
        "Name the longest answer by the API's own field.",
        unless=number(-1),
    ),
    **refusals("t_max_predict_ms thinking_token_budget thinking_budget reasoning_budget"),
    **refusals("repetition_detection n_indent"),
    # How the prompt is made.
    **refusals("continue_final_message", _RENDER),
    **refusals("add_generation_prompt", _RENDER, unless=one_of(True)),
    **refusals("chat_template documents tool_prompt guideline template raw", _RENDER),
    **refusals("system", "Send it as a message of the role 'system'."),
    **refusals("input_ids prompt_token_ids prompt_embeds decoder_input_details", _TOKENS),
    **refusals("truncate_prompt_tokens truncate", "Shorten the prompt before it is sent."),
    **refusals("enable_thinking thinking think", _TEMPLATE, unless=never),
    **refusals("thinking_forced_open"),
    **refusals("images image_data audios videos video_data", "Only text is supported."),
    **refusals("plugins web_search search_parameters integrations", _TOOLS),
    # Which weights answer.
    **refusals("lora lora_path lora_request adapter adapter_id adapters", _ONE_MODEL),
    # What the answer says besides the text.
    **refusals("prompt_logprobs", "Use 'echo' with 'logprobs' on /v1/completions.", unless=never),
    **refusals("logprob_token_ids n_probs top_n_tokens", "Use the API's own 'logprobs'."),
    **refusals("post_sampling_probs"),
    **refusals("return_tokens_as_token_ids return_token_ids return_tokens return_prompt_text"),
    **refusals("return_prompt_token_ids return_meta_info return_hidden_states"),
    **refusals("return_routed_experts details timings_per_token return_progress verbose"),
    **refusals("return_full_text", "Use 'echo' on /v1/completions."),
    **refusals("include_stop_str_in_output no_stop_trim"),
    **refusals("skip_special_tokens detokenize", unless=one_of(True)),
    **refusals(
        "include_reasoning",
        "Thoughts that the model writes are part of its text.",
        unless=one_of(True),
    ),
    **refusals("reasoning_format", unless=one_of("none", "auto")),
    # How other servers share the work.
    **refusals("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_room"),
    **refusals("vllm_xargs session_params"),
    **refusals("options", "Send fields such as 'temperature' by themselves, not as 'options'."),
}

_HARMLESS_EXTENSIONS = names_of("""
    request_id rid session_id trace priority ttl keep_alive draft_model speculative usage provider
    models route transforms
    cache_prompt id_slot n_keep n_discard extra_key custom_labels client_metadata
    routed_dp_rank data_parallel_rank disagg_prefill_dp_rank bootstrap_port ngram_corpus_id
    return_cached_tokens_details routed_experts_start_len routed_experts_prompt_start
    return_token_offsets return_mm_kwargs sse_ping_interval stream_interval backend_sampling
    mm_processor_kwargs media_io_kwargs images_config max_dynamic_patch min_dynamic_patch
    use_audio_in_video truncation_side spaces_between_special_tokens separate_reasoning
    stream_reasoning parse_tool_calls chat_format grammar_lazy repeat_last_n dynatemp_exponent
    mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    xtc_threshold adaptive_decay
""")
"""Ids, labels, scheduling hints, and settings that only matter together with a refused field."""

# --- OpenAI's three endpoints

_OPENAI = KnownFields(
    harmless=_HARMLESS_EXTENSIONS
    | names_of("""
        user safety_identifier store service_tier prediction truncation max_tool_calls
        access_programs background_options image guided_decoding_backend
        guided_whitespace_pattern
    """),
    ignored=names_of("reasoning_effort reasoning verbosity context_management"),
    refused={
        **_EXTENSIONS,
        **refusals("modalities", "Only text is supported.", unless=one_of([], ["text"])),
        **refusals("audio", "Only text is supported."),
        **refusals("function_call", "Use 'tool_choice'.", unless=one_of("none", "auto")),
        **refusals("functions", "Use 'tools' instead."),
        **refusals("web_search_options", _TOOLS, is_lenient=True),
        **refusals("moderation", "Nothing is moderated here."),
        **refusals("previous_response_id", "Use /v1/responses, which has it."),
        **refusals("conversation", _NO_CONVERSATIONS),
        **refusals("background", "Ask for a stream and read it to its end.", is_lenient=True),
        **refusals("include", "Log-probabilities are told by the other endpoints."),
        **refusals("suffix", "Put what follows into the prompt, as the model was trained for it."),
    },
)

CHAT = _OPENAI._replace(
    ignored=_OPENAI.ignored - {"reasoning_effort"},
    refused={
        **_without(
            _OPENAI.refused, "continue_final_message add_generation_prompt functions function_call"
        ),
        **refusals("echo", "Use /v1/completions, which has it."),
        **refusals("add_special_tokens", _RENDER),
        **refusals("prompt input", "Send the conversation as 'messages'."),
        **refusals("instructions", "Send them as a message of the role 'system'."),
        **refusals("text", "Use the fields of this endpoint."),
        **refusals("max_output_tokens", "Use 'max_completion_tokens'.", unless=never),
    },
)
COMPLETIONS = _OPENAI._replace(
    harmless=_OPENAI.harmless | {"parallel_tool_calls"},
    refused={
        **_OPENAI.refused,
        **refusals("add_special_tokens", "Send the prompt as token ids.", unless=one_of(True)),
        **refusals("messages input instructions tools chat_template_kwargs", _CHAT),
        **refusals("tool_choice", _CHAT, unless=one_of("none", "auto")),
        **refusals("text", "Use the fields of this endpoint."),
        **refusals("top_logprobs", "Use 'logprobs' with the number of alternatives."),
        **refusals("max_output_tokens", "Use 'max_tokens'.", unless=never),
    },
)
RESPONSES = _OPENAI._replace(
    harmless=_OPENAI.harmless - {"store"},
    ignored=_OPENAI.ignored - {"reasoning"},
    refused={
        **_without(_OPENAI.refused, "previous_response_id"),
        **refusals("n best_of", "Send the request as often as wanted.", unless=number(1)),
        **refusals("top_logprobs logprobs", "Log-probabilities are told by the other endpoints."),
        **refusals("include", _OPENAI.refused["include"].way_out, unless=has_no_logprobs),
        **refusals("max_tokens max_completion_tokens", "Use 'max_output_tokens'.", unless=never),
        **refusals("messages", "Send the conversation as 'input'."),
        **refusals("prompt", "Send the whole prompt in 'instructions' and 'input'."),
        **refusals("echo", "Use the other endpoints, which have it."),
        **refusals("add_special_tokens", _RENDER),
    },
)

# --- Anthropic's Messages

_ONLY_OPENAI = "Only OpenAI's endpoints have it, such as /v1/chat/completions."
MESSAGES = KnownFields(
    harmless=_HARMLESS_EXTENSIONS
    | names_of("""
        metadata service_tier inference_geo speed user_profile_id workspace_id betas billing_policy
        fallbacks fallback_credit_token user
    """),
    ignored=names_of("context_management"),
    refused={
        **_without(_EXTENSIONS, "thinking system"),
        **refusals("response_format", _OUTPUT_CONFIG, unless=is_plain_text),
        **refusals(
            "structured_outputs guided_json guided_regex guided_choice guided_grammar",
            _OUTPUT_CONFIG,
        ),
        **refusals("container mcp_servers", _TOOLS, is_lenient=True),
        **refusals("compaction", "Ask for a summary in a message instead."),
        **refusals("thread", "Nothing is stored here: send the whole conversation in 'messages'."),
        **refusals("stop", "Use 'stop_sequences' instead."),
        **refusals("max_completion_tokens", "Use 'max_tokens' instead.", unless=never),
        **refusals("n best_of", "Send the request as often as wanted.", unless=number(1)),
        **refusals("repetition_penalty", _ONLY_OPENAI, unless=number(1)),
        **refusals("seed", _ONLY_OPENAI, unless=never),
        **refusals(
            """
            min_p stop_token_ids ignore_eos min_tokens logprobs top_logprobs logit_bias echo
            presence_penalty frequency_penalty add_special_tokens
            """,
            _ONLY_OPENAI,
        ),
    },
)
COUNT_TOKENS = MESSAGES._replace(
    harmless=MESSAGES.harmless
    | names_of("""
        compaction max_tokens temperature top_p top_k stop_sequences stream diagnostics
    """),
    refused=_without(MESSAGES.refused, "compaction"),
)

# --- vLLM's /tokenize

TOKENIZE = {
    name: _EXTENSIONS[name] for name in ("chat_template", "documents", "truncate_prompt_tokens")
}

# --- Objects inside requests

CHAT_MESSAGE: dict[str, Refusal] = {
    **refusals("audio", "Only text is supported.", is_lenient=True),
    **refusals("tools", "Describe all tools in the request's 'tools'."),
    **refusals("prefix partial", "Use 'continue_final_message' of /v1/chat/completions."),
}
RESPONSE_PART = refusals("output_text.prompt_cache_breakpoint refusal.prompt_cache_breakpoint")
UNMARKED = refusals("prompt_cache_breakpoint", "Mark a part of a message instead.")
TOOL_RESULT_PART = refusals("cache_control", "Mark the whole result instead.", is_lenient=True)
BLOCK = refusals("thinking.cache_control redacted_thinking.cache_control")
