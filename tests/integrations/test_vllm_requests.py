"""How rewritten bodies arrive in vLLM's engine, by its own request types.

`make test-vllm` runs this with both versions; without vLLM there is nothing to test.
"""

from typing import Any

import pytest

from tests.integrations.apps import make
from tests.integrations.engines import HAS_VLLM, RealEngine
from tests.integrations.test_vllm_middleware import CHAT, KEY, MESSAGES, TEXTS, digest, marked, post

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not here")

TOLD = {"tenant": digest(KEY), "retention": "24h"}


def sampled(request: Any) -> Any:
    """Return the sampling parameters that vLLM makes of a request."""
    return request.to_sampling_params(16, {})


@pytest.mark.parametrize("path", [path for path in TEXTS if path != MESSAGES])
def test_the_engine_gets_what_the_tier_is_told(path: str) -> None:
    served = make()
    xargs = {"kv_transfer_params": "all"}  # another way in, which vLLM overwrites
    body = {"prompt_cache_retention": "24h", "vllm_xargs": xargs}
    assert post(served, path, body).status_code == 200
    assert sampled(served.only).extra_args["kv_transfer_params"] == {"tieredkv": TOLD}
    assert len(served.only.cache_salt) == 64


def test_the_engine_gets_what_messages_ask_for() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages

    served = make(keys=(KEY,))
    assert post(served, MESSAGES, marked("1h")).status_code == 200
    name = "to_chat_completion_request"
    older = "_convert_anthropic_to_openai_request"
    chat = getattr(Messages, name, None) or getattr(Messages, older)
    request = chat(served.only)
    told = {"tenant": digest(KEY), "retention": "1h", "pin_s": 3600.0}
    assert sampled(request).extra_args["kv_transfer_params"] == {"tieredkv": told}
    assert (request.cache_salt is None) == RealEngine.is_older


def test_vllm_tells_a_retention_back_that_it_knows() -> None:
    served = make()
    assert post(served, "/v1/responses", {"prompt_cache_retention": "24h"}).status_code == 200
    assert served.only.model_dump()["prompt_cache_retention"] == "24h"


def test_each_request_of_a_batch_is_told_and_salted() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    served = make()
    seen: list[Any] = []

    async def handle(request: Any, raw_request: Any) -> Any:
        seen.append(request)
        raise NotImplementedError

    served.app.state.openai_serving_chat_batch = type("Handler", (), {})()
    served.app.state.openai_serving_chat_batch.create_batch_chat_completion = handle
    body = {"model": "m", "messages": [TEXTS[CHAT]["messages"]] * 2}
    post(served, f"{CHAT}/batch", {**body, "prompt_cache_retention": "24h"})
    (batch,) = seen
    assert isinstance(batch, BatchChatCompletionRequest)
    request = batch.to_chat_completion_request(body["messages"][0])
    assert sampled(request).extra_args["kv_transfer_params"] == {"tieredkv": TOLD}
    assert len(request.cache_salt or "") == 64


def test_endpoints_that_forbid_other_fields_are_salted_only() -> None:
    if RealEngine.is_older:
        pytest.skip("vLLM 0.26 has no decisions")
    from vllm.entrypoints.openai.decisions.protocol import DecisionRequest

    from tieredkv.integrations.vllm_app import endpoints_of

    endpoints = endpoints_of(make().app)
    assert endpoints is not None
    assert endpoints["/v1/decisions"].fields == {"cache_salt"}
    assert DecisionRequest.model_config["extra"] == "forbid"


def test_all_endpoints_that_generate_are_known() -> None:
    from tieredkv.integrations.vllm_app import endpoints_of

    endpoints = endpoints_of(make().app)
    assert endpoints is not None
    both = {"cache_salt", "kv_transfer_params"}
    unsalted = {MESSAGES} if RealEngine.is_older else set()
    assert {*TEXTS, f"{CHAT}/batch", "/invocations"} <= endpoints.keys()
    for path in (*TEXTS, f"{CHAT}/batch", "/invocations"):
        expected = both - {"cache_salt"} if path in unsalted else both
        assert endpoints[path].fields == expected
    assert not any(path.endswith("/render") for path in endpoints)
