"""Progress on a terminal and elsewhere."""

import io
import logging
import sys

import pytest

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
    assert capsys.readouterr() == ("", "measuring: 2 of 6\ntiming: 3 of ?\n")


def test_a_server_without_a_terminal_logs_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        progress.terminal_progress()("loading", 1, 2)
    assert caplog.messages == ["loading: 1 of 2"]
    assert capsys.readouterr().err == ""


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
