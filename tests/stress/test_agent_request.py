"""The measurement of agents' requests gives the engine the prompt that transformers makes."""

import asyncio

import pytest

from tests.stress.agent_request import APIS, conversation, measure, project_text, trained


@pytest.mark.parametrize("kind", ["same", "next", "first"])
def test_all_apis_are_measured_with_the_same_prompt(kind: str) -> None:
    text = project_text()[:20_000]
    rows = asyncio.run(measure(trained(text, 400), text, kind, 9, 1))
    assert [(row["api"], row["conversation"]) for row in rows] == [(path, kind) for path in APIS]
    assert len({row["prompt_tokens"] for row in rows}) == 1
    assert all(row["factor"] > 0 for row in rows)


def test_a_conversation_of_201_messages_has_its_system_prompt_and_calls() -> None:
    talk = conversation("abc\n" * 2000, 201)
    assert [it["role"] for it in talk[:4]] == ["system", "user", "assistant", "tool"]
    assert len(talk) == 202 and talk[-1]["role"] == "tool"
