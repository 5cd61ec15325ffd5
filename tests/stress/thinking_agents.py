"""Conversations of agents that think, whose clients keep their thoughts or drop them.

A question is answered behind some calls of a tool, and each answer begins with a thought. Templates
that drop thoughts leave them in until the next question, and then leave out all that stand before
it: that prompt differs from the one before from the first thought behind the last question on.
Letters stand for tokens, as the byte-level tokenizer of `random:` shapes has them.
"""

import math
import random
import string
from typing import Any, Literal, NamedTuple

from tieredkv.bench.sessions import (
    ADDED_TOKENS,
    ANSWER_TOKENS,
    FIRST_RANGE,
    FIRST_SIGMA,
    MAX_PROMPT_TOKENS,
    MAX_THINK_S,
    P90_SIGMAS,
    THINK_S,
    Shape,
)

CALLS = 3
"""Of a tool, behind each question."""

THOUGHT_TOKENS = 400

Thoughts = Literal["kept", "dropped"]
Message = dict[str, Any]


class ChatTurn(NamedTuple):
    """One request of a conversation; as `sessions.Turn`, with messages in place of a prompt."""

    think_s: float
    messages: list[Message]
    answer_tokens: int


def write_conversation(seed: int, session: int, shape: Shape, thoughts: Thoughts) -> list[ChatTurn]:
    """Return a conversation; its texts are the same whether thoughts are kept or dropped.

    It ends early where a prompt would have more than MAX_PROMPT_TOKENS.
    """
    generator = random.Random(f"{seed}/{session}")

    def text(num_tokens: float) -> str:
        return "".join(generator.choices(string.ascii_lowercase, k=shape.scaled(num_tokens)))

    first = generator.lognormvariate(math.log(shape.first_tokens), FIRST_SIGMA)
    first = min(max(first, FIRST_RANGE[0]), FIRST_RANGE[1])
    sigma = math.log(shape.added_p90_tokens / ADDED_TOKENS) / P90_SIGMAS
    history, asked = list[Message](), {"role": "user", "content": text(first)}
    turns, num_tokens = list[ChatTurn](), first
    for turn in range(shape.turns):
        think_s = min(MAX_THINK_S, generator.expovariate(1 / THINK_S)) if turn else 0.0
        is_question = turn % (CALLS + 1) == 0
        if turn:
            call = None if is_question else f"call_{turn}"
            history.append(_answer(text(THOUGHT_TOKENS), text(ANSWER_TOKENS), call))
            added = generator.lognormvariate(math.log(ADDED_TOKENS), sigma)
            num_tokens += THOUGHT_TOKENS + ANSWER_TOKENS + added
            told: Message = {"role": "user"} if call is None else {"role": "tool"}
            asked = told | ({"tool_call_id": call} if call else {}) | {"content": text(added)}
        if num_tokens > MAX_PROMPT_TOKENS:
            break
        history.append(asked)
        last_question = max(i for i, it in enumerate(history) if it["role"] == "user")
        shown = [
            _shown(it, keeps=thoughts == "kept" or i > last_question)
            for i, it in enumerate(history)
        ]
        turns.append(ChatTurn(think_s, shown, shape.scaled(ANSWER_TOKENS)))
    return turns


def _answer(thought: str, content: str, call: str | None) -> Message:
    answer: Message = {"role": "assistant", "content": content, "thought": thought}
    if call is not None:
        function = {"name": "look", "arguments": "{}"}
        answer["tool_calls"] = [{"id": call, "type": "function", "function": function}]
    return answer


def _shown(message: Message, *, keeps: bool) -> Message:
    shown = {name: part for name, part in message.items() if name != "thought"}
    if keeps and "thought" in message:
        shown["content"] = f"{message['thought']}\n{message['content']}"
    return shown


def write_conversations(
    sessions: int, seed: int, shape: Shape, thoughts: Thoughts
) -> list[list[ChatTurn]]:
    """Return some conversations, each the same whatever others are beside it."""
    return [write_conversation(seed, session, shape, thoughts) for session in range(sessions)]
