"""The client that lets agents take turns on a server over HTTP reports what the server answered."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.serving import Server, running
from tests.stress import sessions_by_url
from tieredkv.bench.sessions import MAX_PROMPT_TOKENS, Shape, make_scripts

SHAPE = Shape(turns=3, scale=128, trace=None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("serve")) as it:
        yield it


def test_sessions_go_on_until_the_first_one_ends(server: Server) -> None:
    scripts = make_scripts(2, 0, SHAPE, MAX_PROMPT_TOKENS, 250)
    served = sessions_by_url.run(server.root, "tiny-random", scripts)
    answers, took_s, problem = asyncio.run(served)
    assert not problem
    assert SHAPE.turns <= len(answers) <= 2 * SHAPE.turns
    lengths = {len(turn.prompt) for script in scripts for turn in script}
    assert {answer.prompt_tokens for answer in answers} <= lengths
    assert all(answer.times_s == sorted(answer.times_s) for answer in answers)
    row = sessions_by_url.figures(answers, took_s)
    assert row["answers_per_s"] == len(answers) / took_s
    assert 0 < row["hit_rate"] < 1, "each turn begins with the one before it"
    assert row["hit_rate"] <= row["unbounded_hit_rate"] < 1


def test_conversations_are_found_again_as_far_as_their_messages_are_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_by_url, "MESSAGE_LETTERS", 40)
    scripts = make_scripts(2, 0, SHAPE, MAX_PROMPT_TOKENS // 2, 250)
    served = sessions_by_url.run(server.root, "tiny-random", scripts, "last", is_chat=True)
    answers, took_s, problem = asyncio.run(served)
    assert not problem
    assert len(answers) == 2 * SHAPE.turns
    longest = max(len(turn.prompt) for script in scripts for turn in script)
    assert longest < max(answer.prompt_tokens for answer in answers)
    row = sessions_by_url.figures(answers, took_s)
    assert 0 < row["hit_rate"] <= row["unbounded_hit_rate"] < 1


def test_an_unbounded_cache_finds_the_longest_start_that_was_sent_before() -> None:
    first = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9], [7], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert sessions_by_url.repeated_tokens([first]) == [[0, 3, 2, 0, 4, 3]]
    second = [[1, 2, 8], [1, 2, 3, 4, 6]]
    assert sessions_by_url.repeated_tokens([first, second]) == [[0, 3, 2, 0, 4, 3], [2, 4]]


def test_sessions_go_on_until_the_last_one_ends(server: Server) -> None:
    scripts = make_scripts(2, 1, SHAPE, MAX_PROMPT_TOKENS, 250)
    served = sessions_by_url.run(server.root, "tiny-random", scripts, "last")
    answers, _, problem = asyncio.run(served)
    assert not problem
    assert len(answers) == 2 * SHAPE.turns


@pytest.mark.parametrize("until", ["first", "last"])
def test_a_request_that_fails_ends_the_run_and_is_told(server: Server, until: str) -> None:
    scripts = make_scripts(2, 0, SHAPE, MAX_PROMPT_TOKENS, 250)
    served = sessions_by_url.run(server.root, "another", scripts, until)
    answers, _, problem = asyncio.run(served)
    assert not answers
    assert "404" in problem
