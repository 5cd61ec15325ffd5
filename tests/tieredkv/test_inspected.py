"""The prompt that an operator inspects is read as the request that it is the body of."""

from typing import Any

import pytest

from tests.golden import refused
from tieredkv.errors import RequestError
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.inspected import as_request
from tieredkv.server.openai_api import ChatRequest, CompletionRequest
from tieredkv.server.responses_api import ResponsesRequest

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("hi", CompletionRequest),
        ({"prompt": "hi"}, CompletionRequest),
        (MESSAGES, ChatRequest),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, ChatRequest),
        ({"messages": MESSAGES, "system": "be brief"}, MessagesRequest),
        ({"messages": MESSAGES, "tools": [{"input_schema": {}}]}, MessagesRequest),
        ({"input": "hi"}, ResponsesRequest),
    ],
)
def test_the_shape_of_a_prompt_tells_its_api(prompt: Any, kind: type) -> None:
    found, body = as_request(prompt)
    assert found is kind
    assert "hi" in str(body)


@pytest.mark.parametrize("prompt", [{}, {"messages ": MESSAGES}, 7, None])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with refused(RequestError, param="prompt"):
        as_request(prompt)
