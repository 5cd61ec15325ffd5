"""The blocks of a real server's answers are found, although encoding their text gives other ids."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests import http
from tests.serving import Server, ask_store, running

END = 259
"""The id of `<|im_end|>`."""

SAMPLING: dict[str, Any] = {
    "model": "tiny-random",
    "temperature": 1,
    "max_tokens": 99,
    "min_tokens": 40,
    "stop_token_ids": [END],
    "logit_bias": {**dict.fromkeys(map(str, range(256, 264)), -100), str(END): 100},
}
"""Bytes without sense, which are seldom characters, and then the end of the turn."""


def talk(server: Server, num_turns: int, **fields: Any) -> list[tuple[int, int, int]]:
    """Return how many tokens the prompt of each turn has, has cached, and are answered."""
    messages: list[Any] = []
    told = []
    for i in range(num_turns):
        messages.append({"role": "user", "content": f"Question {i}: what is next?"})
        body = {**SAMPLING, "seed": i, "messages": messages, **fields}
        answer = http.post(f"{server.url}/chat/completions", json=body).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told.append((usage["prompt_tokens"], cached, usage["completion_tokens"]))
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop" and "\ufffd" in choice["message"]["content"]
        messages.append(choice["message"])
    return told


def num_computed(told: list[tuple[int, int, int]]) -> list[int]:
    """Return how many tokens each turn but the first has computed beside those that are new."""
    turns = itertools.pairwise(told)
    return [after[0] - after[1] - (after[0] - before[0] - before[2]) for before, after in turns]


def test_each_turn_computes_what_is_new_and_less_than_a_block(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        told = talk(server, 10)
        assert min(written for _, _, written in told) > 40
        assert max(num_computed(told)) <= 16, told
        salted = talk(server, 10, cache_salt="s")
        assert salted[0][1] == 0 and max(num_computed(salted)) <= 16
        ask_store(server.disk_dir, "evict", "--all", "-y")
        assert talk(server, 1)[0][1] == 0
        assert server.stop() == 0


@pytest.mark.slow
def test_without_a_bound_the_answer_s_blocks_are_not_found(tmp_path: Path) -> None:
    with running(tmp_path, "--remembered-answers-size", "0") as server:
        assert min(num_computed(talk(server, 4))) > 16
