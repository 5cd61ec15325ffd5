"""OpenAI's requests: a JSON body to a checked request.

It knows fields and texts, no sockets, no tokenizer and no engine. What a request asks for is
checked here in whole, before anybody works for it.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.retention import RetentionPolicies
from tieredkv.server import fields as json_fields
from tieredkv.server.fields import Fields, check_items, invalid_type, invalid_value

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MAX_STOPS = 4
MAX_SALT_CHARS = 128
MAX_CACHE_KEY_CHARS = 256
MAX_SEED = 2**63
MAX_TOP_K = 2**31 - 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IGNORED_FIELDS = _names(
    "model user metadata store safety_identifier service_tier prompt_cache_options"
)
_IGNORED_CHAT_FIELDS = _IGNORED_FIELDS | _names("parallel_tool_calls reasoning_effort verbosity")
"""Fields of OpenAI's that mean nothing here, so that even a strict server takes them."""

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """What both endpoints have in common.

    Attributes:
        params: for every answer, but for its seed and the room that is left.
        max_tokens: None where the client gave none.
        num_choices: answers wanted for each prompt.
    """

    params: SamplingParams
    max_tokens: int | None
    num_choices: int
    is_stream: bool
    with_stream_usage: bool
    retention: str | None
    cache_salt: str | None
    prompt_cache_key: str | None

    def params_of(self, choice: int, max_tokens: int, fallback_seed: int) -> SamplingParams:
        """Return the parameters of one answer; equal seeds give equal answers, in their order."""
        seed = self.params.seed if self.params.seed is not None else fallback_seed
        seed = (seed + choice) % MAX_SEED
        min_tokens = min(self.params.min_tokens, max_tokens)
        return replace(self.params, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """`POST /v1/completions`."""

    prompts: list[Prompt]
    is_echo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    """`POST /v1/chat/completions`; the messages are checked and in the form templates know."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any] = field(default_factory=dict)


# --- Bodies to requests ----------------------------------------------------------------------


def read_completion(
    body: Mapping[str, Any], *, policies: RetentionPolicies, is_strict: bool = False
) -> CompletionRequest:
    """Check the body of a completion request.

    Args:
        body: the JSON object.
        policies: what `prompt_cache_retention` may name.
        is_strict: refuse unknown fields and other spellings.

    Raises:
        RequestError: with OpenAI's text, naming the field.
    """
    fields = Fields(body)
    prompts = _prompts(fields.required("prompt"))
    logprobs = fields.integer("logprobs", least=0, most=20)
    is_echo = fields.boolean("echo")
    if is_echo and logprobs is not None:
        raise _unsupported("'echo' together with 'logprobs' is not supported.", "echo")
    if fields.raw("suffix") not in (None, ""):
        raise _unsupported("'suffix' is not supported.", "suffix")
    max_tokens = fields.integer("max_tokens", least=1)
    common = _common(fields, logprobs, max_tokens, _retention(fields, policies, is_strict))
    best_of = fields.integer("best_of", least=1)
    if best_of not in (None, common["num_choices"]):
        raise _unsupported("'best_of' must be equal to 'n'.", "best_of")
    if is_strict:
        fields.check_known(_IGNORED_FIELDS)
    return CompletionRequest(prompts=prompts, is_echo=is_echo, **common)


def read_chat(
    body: Mapping[str, Any], *, policies: RetentionPolicies, is_strict: bool = False
) -> ChatRequest:
    """Check the body of a chat request; arguments and errors as in `read_completion`."""
    fields = Fields(body)
    messages = fields.array("messages", most=MAX_MESSAGES, is_required=True) or []
    checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    top_logprobs = fields.integer("top_logprobs", least=0, most=20)
    has_logprobs = fields.boolean("logprobs")
    if top_logprobs is not None and not has_logprobs:
        text = "'top_logprobs' is only allowed when 'logprobs' is true."
        raise RequestError(text, param="top_logprobs", code="invalid_value")
    max_tokens = fields.integer("max_completion_tokens", least=1)
    old_max_tokens = fields.integer("max_tokens", least=1)
    response_format = fields.object("response_format")
    if response_format is not None:
        response_format.choice("type", ("text",), is_required=True)
    for modality in fields.array("modalities") or ():
        if modality != "text":
            raise invalid_value("modalities", str(modality), ("text",))
    logprobs = (top_logprobs or 0) if has_logprobs else None
    max_tokens = max_tokens if max_tokens is not None else old_max_tokens
    common = _common(fields, logprobs, max_tokens, _retention(fields, policies, is_strict))
    arguments = _template_arguments(fields)
    tools = _tools(fields)
    if is_strict:
        fields.check_known(_IGNORED_CHAT_FIELDS)
    return ChatRequest(messages=checked, tools=tools, template_arguments=arguments, **common)


def read_model(body: Mapping[str, Any], served: str) -> None:
    """Check that the body asks for the model that is served.

    Raises:
        RequestError: it asks for another one, or for none.
    """
    name = Fields(body).string("model", is_required=True)
    if name != served:
        raise unknown_model(str(name))


def unknown_model(name: str) -> RequestError:
    """Return the error for a model that is not served."""
    text = f"The model `{name[:200]}` does not exist or you do not have access to it."
    return RequestError(text, param="model", code="model_not_found", status=404)


def check_prompt(prompt: list[int], *, max_model_len: int, vocab_size: int, is_chat: bool) -> None:
    """Refuse a prompt that is empty, leaves no room for an answer, or has unknown token ids."""
    what = "messages" if is_chat else "prompt"
    text, code = "", "invalid_value"
    if not prompt:
        text = f"Invalid '{what}': the prompt is empty. At least one token is needed."
    elif len(prompt) >= max_model_len:
        code = "context_length_exceeded"
        text = (
            f"This model's maximum context length is {max_model_len} tokens. However, your {what} "
            f"resulted in {len(prompt)} tokens and at least one must be generated. Please "
            f"reduce the length of the {what}."
        )
    elif bad := [id for id in (min(prompt), max(prompt)) if not 0 <= id < vocab_size]:
        vocabulary = f"the model's vocabulary of {vocab_size} tokens"
        text = f"Invalid '{what}': token id {bad[0]} is not in {vocabulary}."
    if text:
        raise RequestError(text, param=what, code=code)


def _common(
    fields: Fields, logprobs: int | None, max_tokens: int | None, retention: str | None
) -> dict[str, Any]:
    is_stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not is_stream:
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise RequestError(text, param="stream_options", code="invalid_value")
    return {
        "params": _sampling_params(fields, logprobs, max_tokens),
        "max_tokens": max_tokens,
        "num_choices": fields.integer("n", least=1, most=MAX_CHOICES) or 1,
        "is_stream": is_stream,
        "with_stream_usage": bool(stream_options and stream_options.boolean("include_usage")),
        "retention": retention,
        "cache_salt": fields.string("cache_salt", most=MAX_SALT_CHARS),
        "prompt_cache_key": fields.string("prompt_cache_key", most=MAX_CACHE_KEY_CHARS),
    }


def _retention(fields: Fields, policies: RetentionPolicies, is_strict: bool) -> str | None:
    """Return the policy's own name; only a strict server refuses the other spelling of it."""
    name = fields.string("prompt_cache_retention")
    if name is None:
        return None
    if is_strict and name not in policies.names:
        raise invalid_value("prompt_cache_retention", name, list(policies.names))
    return policies.get(name).name


def _sampling_params(fields: Fields, logprobs: int | None, limit: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", least=0, most=2),
        "top_p": fields.number("top_p", least=0, most=1),
        "top_k": fields.integer("top_k", least=-1, most=MAX_TOP_K),
        "min_p": fields.number("min_p", least=0, most=1),
        "seed": fields.integer("seed", least=-MAX_SEED, most=MAX_SEED - 1),
        "min_tokens": fields.integer("min_tokens", least=0, most=limit),
        "presence_penalty": fields.number("presence_penalty", least=-2, most=2),
        "frequency_penalty": fields.number("frequency_penalty", least=-2, most=2),
        "repetition_penalty": fields.number("repetition_penalty"),
        "logit_bias": fields.raw("logit_bias"),
        "stop": _stops(fields),
        "stop_token_ids": _token_ids(fields.array("stop_token_ids") or [], "stop_token_ids"),
        "ignore_eos": fields.boolean("ignore_eos"),
        "logprobs": logprobs,
    }
    if given["logit_bias"] is not None:
        fields.object("logit_bias")
    if given["top_p"] == 0:
        given["top_p"], given["temperature"] = None, 0.0  # the smallest set is the likeliest token
    # NOTE: `min_tokens` is checked against the client's limit above, and fitted to the room later.
    given["max_tokens"] = limit or max(16, given["min_tokens"] or 0)
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except RequestError as error:
        code = error.code or "invalid_value"
        raise RequestError(str(error), param=error.param, code=code) from None


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None or isinstance(value, str):
        return (value,) if value else ()
    texts = fields.array("stop", most=MAX_STOPS) or []
    check_items(texts, str, "stop")
    return tuple(text for text in texts if text)


def _prompts(value: object) -> list[Prompt]:
    """Return a list of prompts from any of the four forms."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid_type("prompt", "a string or an array", value)
    if not value or isinstance(value[0], int):
        return [_token_ids(value, "prompt")]
    Fields({"prompt": value}).array("prompt", most=MAX_PROMPTS)
    if isinstance(value[0], str):
        check_items(value, str, "prompt")
        return list(value)
    check_items(value, list, "prompt")
    return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]


def _token_ids(values: list[Any], path: str) -> list[int]:
    check_items(values, int, path)
    return values


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _message(value: object, path: str) -> dict[str, Any]:
    """Check one message and bring it to the form that chat templates know."""
    fields = Fields.of(value, path)
    role = fields.choice("role", _ROLES, is_required=True)
    tool_calls = fields.array("tool_calls") if role == "assistant" else None
    content = fields.raw("content")
    if content is None and not tool_calls and role != "assistant":
        fields.required("content")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(content, fields.path("content"))
    calls = enumerate(tool_calls or ())
    if tool_calls:
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in calls]
    for name in ("name", "tool_call_id"):
        text = fields.string(name)
        if text is not None:
            message[name] = text
    return message


def _content(value: object, path: str) -> str:
    """Return a message's text; text parts are joined by line ends."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid_type(path, "a string or an array", value)
    texts = []
    for i, part in enumerate(value):
        fields = Fields.of(part, f"{path}[{i}]")
        kind = fields.choice("type", ("text", "refusal"), is_required=True)
        text = fields.required(str(kind))
        if not isinstance(text, str):
            raise invalid_type(fields.path(str(kind)), "a string", text)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(value: object, path: str) -> dict[str, Any]:
    fields = Fields.of(value, path)
    fields.choice("type", ("function",))
    function = Fields.of(fields.required("function"), fields.path("function"))
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        # Templates print an object as they like; OpenAI's clients send its text.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    call = {"name": function.string("name", is_required=True), "arguments": arguments or {}}
    return {"id": fields.string("id"), "type": "function", "function": call}


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise _unsupported("'tool_choice' can only be 'none' or 'auto'.", "tool_choice")
    tools = fields.array("tools", most=MAX_TOOLS)
    for i, tool in enumerate(tools or ()):
        tool_fields = Fields.of(tool, f"tools[{i}]")
        tool_fields.choice("type", ("function",), is_required=True)
        function = Fields.of(tool_fields.required("function"), f"tools[{i}].function")
        function.string("name", is_required=True)
    return tools or None


_RESERVED_TEMPLATE_ARGUMENTS = _names(
    "messages conversation tools documents chat_template add_generation_prompt tokenize "
    "continue_final_message return_dict return_tensors padding truncation max_length"
)


def _template_arguments(fields: Fields) -> dict[str, Any]:
    """Return plain values for the template, such as `enable_thinking`, and nothing else."""
    arguments = fields.raw("chat_template_kwargs")
    if arguments is None:
        return {}
    for name, value in Fields.of(arguments, "chat_template_kwargs").items():
        if name in _RESERVED_TEMPLATE_ARGUMENTS or not isinstance(value, str | int | float | bool):
            raise json_fields.unknown_parameter(f"chat_template_kwargs.{name}")
    return dict(arguments)


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
