"""Progress on a terminal and elsewhere."""

import io
import logging
import sys

import pytest

from tests.golden import told
from tieredkv import LLM
from tieredkv.bench import progress


def test_a_bench_without_a_terminal_writes_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = progress.bench_progress()
    draw("measuring", 1, 6)
    assert capsys.readouterr() == ("", ""), "it has only begun"
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    draw("measuring", 2, 6)
    draw("timing", 3, 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    told(captured.err)


def test_a_server_without_a_terminal_logs_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        progress.terminal_progress()("loading", 1, 2)
    [line] = caplog.messages
    told(line)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stage", "done", "total"),
    [
        ("taking host memory", 384 << 20, 1 << 30),
        ("pinning host memory", 1 << 30, 64 << 30),
        ("writing to disk", 12, 300),
        ("planning attention", 30, 100),
        ("loading weights", 0, 1),
    ],
)
def test_a_servers_log_tells_progress_with_units_and_names_no_bench(
    stage: str,
    done: int,
    total: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        progress.terminal_progress()(stage, done, total)
    [(logger, level, line)] = caplog.record_tuples
    assert (logger, level) == ("tieredkv", logging.INFO)
    told(line)


def test_each_stage_of_a_start_has_a_unit_or_is_one_step() -> None:
    told = dict[str, set[int]]()

    def note(stage: str, _done: int, total: int) -> None:
        told.setdefault(stage, set()).add(total)

    with LLM("tiny-random", device_size="1MiB", host_size="1MiB", progress=note):
        pass
    assert {"taking host memory", "drawing weights", "warming up"} <= told.keys()
    assert {stage for stage, totals in told.items() if totals != {1}} <= progress.UNITS.keys()


def test_a_terminal_shows_sizes_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.ending_progress():
        progress.terminal_progress()("taking host memory", 384 << 20, 1 << 30)
    assert "384 MiB of 1 GiB" in terminal.getvalue()


def test_bars_that_do_not_reach_their_total_leave_a_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    hide, show = "\x1b[?25l", "\x1b[?25h"  # the cursor
    with pytest.raises(KeyboardInterrupt), progress.ending_progress():
        progress.bench_progress()("measuring", 1, 6)
        assert hide in terminal.getvalue()
        assert show not in terminal.getvalue()
        raise KeyboardInterrupt
    assert terminal.getvalue().count(show) == 1
