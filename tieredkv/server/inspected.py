"""Reads the prompt that an operator inspects as a request of a client would be read."""

from collections.abc import Callable
from typing import Any

import msgspec

from tieredkv.engine.engine_messages import EngineInfo, EngineRequest
from tieredkv.errors import RequestError
from tieredkv.fields import MAX_VALUES, parse_body, read
from tieredkv.operate.calls import Inspect
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.asked import ApiRequest, Json
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys
from tieredkv.server.openai_api import ChatRequest, CompletionRequest
from tieredkv.server.remembered import Namespace
from tieredkv.server.responses_api import ResponsesRequest
from tieredkv.server.threads import Cancellation


def as_request(prompt: Any) -> tuple[type[ApiRequest], Json]:
    """Return the kind of request that a prompt is the body of, and the whole body.

    A text is a prompt of a completion, and a list is the messages of a chat. Messages with a
    top-level `system`, or with tools that have an `input_schema`, are Anthropic's.

    Raises:
        RequestError: it is the body of none of the APIs.
    """
    match prompt:
        case str():
            return CompletionRequest, {"prompt": prompt}
        case list():
            return ChatRequest, {"messages": prompt}
        case {"input": _}:
            return ResponsesRequest, prompt
        case {"prompt": _}:
            return CompletionRequest, prompt
        case {"messages": _, "system": _} | {"messages": _, "tools": [{"input_schema": _}, *_]}:
            return MessagesRequest, {"max_tokens": 1, **prompt}
        case {"messages": _}:
            return ChatRequest, prompt
    text = "The prompt must be a text, a list of messages, or a body with 'messages', 'prompt' or"
    raise RequestError(f"{text} 'input'.", param="prompt")


def planned(
    call: Inspect,
    tokenization_of: Callable[[Namespace, Cancellation], Tokenization],
    info: EngineInfo,
    keys: Keys,
    cancellation: Cancellation,
) -> EngineRequest:
    """Return the request that a prompt is; its model is the one that is served.

    Args:
        call: has the prompt, and whose it is.
        tokenization_of: returns the tokenization for requests of a namespace.
        info: of the engine.
        keys: say which tenants there are, and what their requests may ask.
        cancellation: ends the work early.

    Raises:
        RequestError: a request with this prompt would be refused, or it has not exactly one prompt.
    """
    if not keys.knows(call.tenant):
        text = "This server has API keys: say with which one the prompt is sent (--api-key)."
        raise RequestError("No tenant has this API key." if call.tenant else text)
    rules, (kind, body) = keys.rules(call.tenant), as_request(call.prompt)
    body = parse_body(msgspec.json.encode(body), MAX_VALUES + info.max_model_len)
    given = {"cache_salt": call.cache_salt, "prompt_cache_key": call.prompt_cache_key}
    body |= {name: value for name, value in given.items() if value is not None}
    if body.get("previous_response_id") is not None:
        text = "A conversation that continues a stored response cannot be inspected."
        raise RequestError(text, param="previous_response_id")
    request = read(kind, {**body, "model": info.model}, rules.refuses).cleaned(rules)
    request.check(rules)
    salt, key = (getattr(request, name, None) for name in given)
    asked = request.ask(tokenization_of((call.tenant, salt, key), cancellation), rules)
    if len(asked.prompts) != 1:
        text = f"A body with {len(asked.prompts)} prompts cannot be inspected. Give one."
        raise RequestError(text, param="prompt")
    return asked.engine_requests(info, call.tenant, rules)[0]
