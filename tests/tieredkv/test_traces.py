"""Traces are read as they are, and what is wrong with one is named by line and field."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.golden import refused
from tests.sizing.traces import line, random_lines, write
from tieredkv.errors import ConfigError
from tieredkv.traces import STDIN, read_trace
from tieredkv.types import ignore_progress

GOOD = line(1.0, [1, 2], last=5)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "gzipped-without-its-ending"])
def test_a_trace_is_read_gzipped_or_not(name: str, tmp_path: Path) -> None:
    lines = random_lines(0)
    path = tmp_path / name
    write(path if "." in name else tmp_path / "x.gz", lines)
    if "." not in name:
        (tmp_path / "x.gz").rename(path)
    trace = read_trace(path, ignore_progress)
    assert [each.hash_ids for each in trace.requests] == [each["hash_ids"] for each in lines]
    assert trace.span_s == (lines[-1]["timestamp"] - lines[0]["timestamp"]) / 1e3
    assert trace.most_blocks == max(len(each["hash_ids"]) for each in lines)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_trace_is_read_from_stdin(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write(tmp_path / name, [GOOD]).read_bytes()
    stdin = SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert len(read_trace(STDIN, ignore_progress).requests) == 1


def test_fields_of_others_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD | {"session": "a", "turn": 3}) + "\n\n")
    assert len(read_trace(path, ignore_progress).requests) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"hash_ids": None},
        {"hash_ids": [1, -2]},
        {"hash_ids": [1, "2"]},
        {"hash_ids": [1]},
        {"hash_ids": [1, 1]},
        {"input_length": -1},
        {"input_length": 1.5},
        {"input_length": True},
        {"output_length": "9"},
        {"timestamp": -5},
        {"timestamp": 999},
        {"timestamp": ...},
        {"input_length": ...},
        {"output_length": ...},
        {"hash_ids": ...},
    ],
    ids=str,
)
def test_a_bad_line_is_named_with_its_field(bad: dict[str, object], tmp_path: Path) -> None:
    broken = {name: value for name, value in (GOOD | bad).items() if value is not ...}
    path = write(tmp_path / "trace.jsonl", [GOOD, broken])
    with refused(ConfigError, hide={str(path): "TRACE"}):
        read_trace(path, ignore_progress)


RECORDED = {
    "timestamp": 5,
    "input_length": 40,
    "output_length": 9,
    "hash_ids": [1, 2],
    "answer_hash_ids": [3],
    "block_tokens": 16,
    "retention": "24h",
}


def test_a_recorded_trace_says_the_size_of_its_blocks_and_is_sorted(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [RECORDED, RECORDED | {"timestamp": 4}])
    trace = read_trace(path, ignore_progress)
    assert [each.timestamp for each in trace.requests] == [4, 5]
    assert trace.requests[0].chain == [1, 2, 3]
    assert (trace.block_tokens, trace.num_distinct, trace.most_blocks) == (16, 3, 3)
    assert read_trace(path, ignore_progress, block_tokens=16) == trace


@pytest.mark.parametrize(
    "bad",
    [
        {"block_tokens": 32},
        {"block_tokens": 0},
        {"input_length": 31},
        {"output_length": 7},
        {"answer_hash_ids": [2]},
        {"answer_hash_ids": [-2]},
        {"block_tokens": ...},
    ],
    ids=str,
)
def test_a_bad_line_of_a_recording_is_named(bad: dict[str, object], tmp_path: Path) -> None:
    broken = {name: value for name, value in (RECORDED | bad).items() if value is not ...}
    path = write(tmp_path / "trace.jsonl", [RECORDED, broken])
    with refused(ConfigError, hide={str(path): "TRACE"}):
        read_trace(path, ignore_progress)


def test_a_retention_that_no_policy_has_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [RECORDED, RECORDED | {"retention": "nightly"}])
    assert len(read_trace(path, ignore_progress).requests) == 2
    with refused(ConfigError, hide={str(path): "TRACE"}):
        read_trace(path, ignore_progress, retentions=("in_memory", "24h"))


@pytest.mark.parametrize(
    "content", [b"", b"nonsense\n", b"[1]\n", b"\x1f\x8b\x08\x00cut", b"\x1f\x8b" + 20 * b"x"]
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with refused(ConfigError, hide={str(path): "TRACE"}):
        read_trace(path, ignore_progress)


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with refused(ConfigError):
        read_trace(tmp_path / "absent", ignore_progress)
