"""A recording has each request whole and tells nothing of its text; faults never stop a server."""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.golden import refused, told
from tests.waiting import wait_until
from tieredkv.config import Settings
from tieredkv.engine.answer import Answer
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import Claim, EngineRequest, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError
from tieredkv.server import recorder as recording
from tieredkv.server.recorder import Recorder
from tieredkv.traces import read_trace
from tieredkv.types import ignore_progress

SETTINGS, SIZE = Settings(), 16
TOKENIZER = load_tokenizer("tiny-random")
PROMPT = [*range(40)]


def answer(prompt: list[int] = PROMPT, *, num_tokens: int = 9, **asked: Any) -> Answer:
    """Return an answer that has ended."""
    request = EngineRequest(prompt_token_ids=prompt, params=SamplingParams(), **asked)
    made = Answer(request, TOKENIZER)
    made.take(TokenOutput(request_id="", token_ids=[7] * num_tokens, finish_reason="length"))
    return made


def recorded(path: Path, *answers: Answer, settings: Settings = SETTINGS) -> list[dict[str, Any]]:
    """Record requests, and return the lines of the file."""
    recorder = Recorder(path, settings)
    for each in answers:
        recorder.add(each, time.perf_counter(), SIZE)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the name of a new file."""
    return tmp_path / "trace.jsonl"


def test_a_line_has_the_blocks_of_the_prompt_and_those_that_the_answer_fills(path: Path) -> None:
    began_ms = 1000 * time.time()
    [line] = recorded(path, answer(retention="24h"))
    assert began_ms - 1 <= line.pop("timestamp") <= 1000 * time.time() + 1
    ids, of_answer = line.pop("hash_ids"), line.pop("answer_hash_ids")
    assert (len(ids), len(of_answer)) == (2, 1), "40 + 9 tokens, of which the last is not computed"
    assert all(0 <= each < 1 << 63 for each in ids + of_answer)
    assert line == {"input_length": 40, "output_length": 9, "block_tokens": 16, "retention": "24h"}
    [request] = read_trace(path, ignore_progress).requests
    assert request.chain == ids + of_answer


def test_a_token_that_is_not_computed_fills_no_block(path: Path) -> None:
    lines = recorded(path, answer(num_tokens=8), answer(PROMPT[:32], num_tokens=0))
    assert [len(each["hash_ids"]) for each in lines] == [2, 2]
    assert not any("answer_hash_ids" in each for each in lines)


def test_equal_ids_are_blocks_that_may_be_shared(path: Path) -> None:
    others = [
        answer(PROMPT[:32]),
        answer([*PROMPT[:16], *[3] * 16]),
        answer([3, *PROMPT[1:]]),
        answer(tenant="a"),
        answer(tenant="a", cache_salt="b"),
    ]
    first, *rest = (set(each["hash_ids"]) for each in recorded(path, answer(), *others))
    assert [len(first & each) for each in rest] == [2, 1, 0, 0, 0]
    assert not rest[3] & rest[4]


def test_what_may_not_be_cached_has_no_id(path: Path) -> None:
    some = answer(cacheable_tokens=16), answer(prompt_logprobs=1), answer(cacheable_tokens=0)
    assert [len(each["hash_ids"]) for each in recorded(path, *some)] == [1, 0, 0]
    assert len(read_trace(path, ignore_progress).requests) == 3


def test_the_retention_is_the_longest_of_a_request(path: Path) -> None:
    claims = [Claim(end_token=16, retention="24h"), Claim(end_token=32, retention="5m")]
    lines = recorded(path, answer(), answer(claims=claims), answer(retention="in-memory"))
    assert [each["retention"] for each in lines] == ["in_memory", "24h", "in_memory"]


def test_two_recordings_of_the_same_requests_share_no_id(tmp_path: Path) -> None:
    found = [
        {
            each
            for line in recorded(tmp_path / name, answer(), answer(PROMPT[:20]))
            for each in line["hash_ids"]
        }
        for name in "ab"
    ]
    assert [len(each) for each in found] == [2, 2]
    assert not found[0] & found[1]


def test_a_file_that_exists_is_neither_read_nor_written(path: Path) -> None:
    path.write_text("mine")
    with refused(ConfigError):
        Recorder(path, SETTINGS)
    assert path.read_text() == "mine"
    link = path.with_name("link")
    link.symlink_to(path.with_name("target"))
    with refused(ConfigError):
        Recorder(link, SETTINGS)
    with refused(ConfigError):
        Recorder(path.with_name("absent") / "trace", SETTINGS)


def test_only_its_owner_may_read_it_and_an_empty_one_is_removed(path: Path) -> None:
    recorder = Recorder(path, SETTINGS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    recorder.close()
    recorder.close()
    assert not path.exists()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; while it is set, the recorder's writes end in their middle."""
    is_full, write = threading.Event(), os.write

    def write_some(file: int, data: bytes) -> int:
        if not is_full.is_set():
            return write(file, data)
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        yield is_full


def compare_warnings(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compare the two warnings: one when the first request is left out, and one at the end."""
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 2
    for warning in warnings:
        told(warning, hide={str(path): "RECORDING"})


def test_a_full_disk_leaves_whole_lines_and_a_warning(
    path: Path, full_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(path, SETTINGS)

    def has_handled(count: int) -> bool:
        return recorder.num_recorded + recorder.num_failed == count

    for number in range(4):
        recorder.add(answer(num_tokens=number + 1), time.perf_counter(), SIZE)
        wait_until(partial(has_handled, number + 1), "the request waits")
        full_disk.set() if number < 2 else full_disk.clear()
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["output_length"] for each in lines] == [1, 4]
    assert (recorder.num_recorded, recorder.num_failed) == (2, 2)
    compare_warnings(path, caplog)


def test_requests_that_wait_for_too_long_are_left_out_and_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_write, write = threading.Event(), os.write

    def write_later(file: int, data: bytes) -> int:
        may_write.wait()
        return write(file, data)

    monkeypatch.setattr(os, "write", write_later)
    monkeypatch.setattr(recording, "MAX_WAITING_TOKENS", 3 * 49 - 1)
    recorder = Recorder(path, SETTINGS)
    for _ in range(5):
        recorder.add(answer(), time.perf_counter(), SIZE)
    may_write.set()
    recorder.close()
    assert len(path.read_text().splitlines()) == 3
    assert recorder.num_recorded == 3
    compare_warnings(path, caplog)
