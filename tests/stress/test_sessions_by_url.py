"""The client that lets agents take turns on a server over HTTP reports what the server answered."""

import asyncio
from collections.abc import Iterator
from typing import get_args

import pytest

from tests.serving import Server, running
from tests.stress import sessions_by_url
from tests.stress.thinking_agents import Thoughts, write_conversation, write_conversations
from tieredkv.bench.sessions import MAX_PROMPT_TOKENS, Shape, make_scripts

SHAPE = Shape(turns=3, scale=128, trace=None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("serve")) as it:
        yield it


def test_sessions_go_on_until_the_first_one_ends(server: Server) -> None:
    scripts = make_scripts(2, 0, SHAPE, MAX_PROMPT_TOKENS, 250)
    asked = sessions_by_url.asked_ids("tiny-random", scripts)
    served = sessions_by_url.run(server.root, asked)
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
    chats = map(sessions_by_url.chat_of, scripts)
    asked = sessions_by_url.asked_chats("tiny-random", chats, server.root, as_ids=False)
    served = sessions_by_url.run(server.root, asked, "last")
    answers, took_s, problem = asyncio.run(served)
    assert not problem
    assert len(answers) == 2 * SHAPE.turns
    longest = max(len(turn.prompt) for script in scripts for turn in script)
    assert longest < max(answer.prompt_tokens for answer in answers)
    row = sessions_by_url.figures(answers, took_s)
    assert 0 < row["hit_rate"] <= row["unbounded_hit_rate"] < 1


def test_conversations_are_sent_as_the_token_ids_that_another_server_makes(server: Server) -> None:
    chats = write_conversations(2, 0, SHAPE._replace(turns=2), "kept")
    asked = sessions_by_url.asked_chats("tiny-random", chats, server.root, as_ids=True)
    assert {each.path for asks in asked for each in asks} == {"/v1/completions"}
    answers, took_s, problem = asyncio.run(sessions_by_url.run(server.root, asked, "last"))
    assert not problem
    lengths = [len(each.prompt) for asks in asked for each in asks]
    assert sorted(answer.prompt_tokens for answer in answers) == sorted(lengths)
    first, second = sessions_by_url.figures(answers, took_s)["by_turn"]
    assert first["hit_rate"] < 0.1 < second["hit_rate"] <= second["unbounded_hit_rate"]


def test_thoughts_stay_until_the_next_question() -> None:
    kept, dropped = (
        write_conversation(0, 0, SHAPE._replace(turns=6), thoughts)
        for thoughts in get_args(Thoughts)
    )
    for turn in range(4):
        assert kept[turn].messages == dropped[turn].messages
    question, before = dropped[4].messages, kept[3].messages
    assert question[0] == before[0]
    for i in range(1, 8, 2):
        thought, said = kept[4].messages[i]["content"].split("\n")
        assert thought
        assert question[i]["content"] == said
    roles = [message["role"] for message in question]
    assert roles == ["user", *["assistant", "tool"] * 3, "assistant", "user"]


def test_an_unbounded_cache_finds_the_longest_start_that_was_sent_before() -> None:
    first = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9], [7], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert sessions_by_url.repeated_tokens([first]) == [[0, 3, 2, 0, 4, 3]]
    second = [[1, 2, 8], [1, 2, 3, 4, 6]]
    assert sessions_by_url.repeated_tokens([first, second]) == [[0, 3, 2, 0, 4, 3], [2, 4]]


def test_sessions_go_on_until_the_last_one_ends(server: Server) -> None:
    scripts = make_scripts(2, 1, SHAPE, MAX_PROMPT_TOKENS, 250)
    asked = sessions_by_url.asked_ids("tiny-random", scripts)
    served = sessions_by_url.run(server.root, asked, "last")
    answers, _, problem = asyncio.run(served)
    assert not problem
    assert len(answers) == 2 * SHAPE.turns


@pytest.mark.parametrize("until", ["first", "last"])
def test_a_request_that_fails_ends_the_run_and_is_told(server: Server, until: str) -> None:
    scripts = make_scripts(2, 0, SHAPE, MAX_PROMPT_TOKENS, 250)
    asked = sessions_by_url.asked_ids("another", scripts)
    served = sessions_by_url.run(server.root, asked, until)
    answers, _, problem = asyncio.run(served)
    assert not answers
    assert "404" in problem
