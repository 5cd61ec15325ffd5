"""`tieredkv top` against a real server, by its URL and by the folder of its store."""

import contextlib
import json
import os
import re
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import http
from tests.golden import told
from tests.serving import COMMAND, Done, Server, ask_store, heed_ctrl_c, running, tieredkv
from tests.stress import top_frame
from tests.waiting import wait_until

KEY = "operator"
PROMPT = "These instructions are long enough for some blocks of a prompt cache. " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that was asked the same thing twice, and once in another namespace."""
    with running(tmp_path_factory.mktemp("top"), "--admin-key", KEY) as server:
        for salt in (None, None, "s"):
            body = {"model": "tiny-random", "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
            http.post(f"{server.root}/v1/completions", json=body).raise_for_status()
        yield server


def run(*words: str, **environ: str) -> Done:
    """Run the command, without a terminal."""
    return tieredkv("top", *words, **{"TIEREDKV_ADMIN_KEY": KEY, **environ})


def test_a_url_tells_all_figures(server: Server) -> None:
    done = run("--url", server.root, "--once", "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["source"], told["model"]) == (server.root, "tiny-random")
    assert told["tiers"].keys() == {"device", "host", "disk"}
    assert told["tiers"]["device"]["held_bytes"] > 0
    assert told["tiers"]["disk"]["size_bytes"] == 256 << 20
    assert told["moves"].keys() == {"device,host", "host,device", "host,disk", "disk,host"}
    assert told["moves"]["disk,host"]["learnt_bytes_per_s"] > 0
    assert told["recent"]["ttft"].keys() == {"cold", "device"}
    cold, hit, salted = sorted(told["slowest"], key=lambda request: request["at"])
    assert (cold["source"], cold["cached_tokens"], cold["miss_reason"]) == (
        "cold",
        {},
        "never_seen",
    )
    assert salted["miss_reason"] == "other_namespace", "as its receipt says"
    num_tokens, cached = hit["prompt_tokens"], hit["cached_tokens"]["device"]
    assert 0.8 * num_tokens < cached <= num_tokens
    assert told["recent"]["hit_rate"] == pytest.approx(cached / (3 * num_tokens))
    assert cold["ttft_s"] >= cold["queue_s"] >= 0
    assert PROMPT[:20] not in done.stdout


def test_a_folder_tells_what_its_worker_knows(server: Server) -> None:
    told = ask_store(server.disk_dir, "top")
    assert told["tiers"]["device"]["held_bytes"] > 0
    assert told["moves"].keys() == {"device,host", "host,device", "host,disk", "disk,host"}
    assert told["lifetimes"]["shortfall"] == ""
    assert (told["model"], told["recent"], told["slowest"]) == (None, None, None)


def test_a_pipe_gets_one_picture_without_escape_codes(server: Server) -> None:
    done = run("--url", server.root, COLUMNS="60")
    assert done.returncode == 0, done.stderr
    assert "slowest requests" in done.stdout and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 60


def test_an_svg_of_a_frame_asks_nothing_of_other_servers(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "top.svg"
    words = ("--url", server.root, "--admin-key", KEY, "--span", "0.1", "--out", str(out))
    done = CliRunner().invoke(top_frame.main, words)
    assert done.exit_code == 0, done.output
    svg = out.read_text()
    assert "slowest" in svg and "never_seen" in svg
    assert "@font-face" not in svg and not re.search(r"(href|src)=|url\((?!#)", svg)


@pytest.mark.parametrize(
    ("words", "environ", "exit_code"),
    [
        ((), {"TIEREDKV_ADMIN_KEY": "wrong"}, 2),
        (("--interval", "1ms"), {}, 2),
        (("--interval", "soon"), {}, 2),
        (("--url", "http://127.0.0.1:1"), {}, 3),
        (("--url", "nonsense"), {}, 3),
    ],
)
def test_bad_input_and_no_server(
    server: Server, words: tuple[str, ...], environ: dict[str, str], exit_code: int
) -> None:
    done = run("--url", server.root, "--once", *words, **environ)
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    text = re.sub("(does not answer:).*", r"\1 CAUSE", done.stderr)
    told(text, hide={server.root: "URL"})


class Terminal:
    """The command in a terminal.

    Attributes:
        all_written: what was read of its output so far.
    """

    def __init__(self, *words: str) -> None:
        self._fd, other_end = os.openpty()
        self.settings = termios.tcgetattr(self._fd)
        environ = {**os.environ, "TIEREDKV_ADMIN_KEY": KEY, "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*COMMAND, "top", *words],
            stdin=other_end,
            stdout=other_end,
            stderr=subprocess.PIPE,
            env=environ,
            preexec_fn=heed_ctrl_c,
        )
        self._other_end = other_end
        os.set_blocking(self._fd, False)
        self.all_written = ""

    def written(self) -> str:
        """Read what it has written since, and return all of it."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.all_written += os.read(self._fd, 1 << 16).decode(errors="replace")
        return self.all_written

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def wait(self) -> int:
        """Wait for its end, while it can write; return the exit code."""
        with self.process:
            wait_until(lambda: bool(self.written()) and self.process.poll() is not None)
        assert termios.tcgetattr(self._fd) == self.settings, "the terminal is not as it was"
        self.written()
        os.close(self._fd)
        os.close(self._other_end)
        return self.process.returncode


@pytest.mark.parametrize("ending", ["q", "Ctrl-C"])
def test_a_terminal_shows_pictures_until_the_user_ends_it(server: Server, ending: str) -> None:
    terminal = Terminal("--url", server.root, "--interval", "100ms")
    wait_until(
        lambda: terminal.written().count(" running, ") >= 3, "no pictures", process=terminal.process
    )
    if ending == "q":
        terminal.press("q")
    else:
        terminal.process.send_signal(signal.SIGINT)
    assert terminal.wait() == 0
    assert terminal.all_written.endswith("\x1b[?1049l"), "the screen is not as it was"


def test_a_server_that_ends_leaves_its_last_picture_with_a_note_and_its_store_alone(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "--admin-key", KEY) as server:
        terminal = Terminal("--disk-dir", str(server.disk_dir), "--interval", "100ms")
        wait_until(lambda: " running, " in terminal.written(), process=terminal.process)
        server.stop()
        wait_until(lambda: "no server uses" in terminal.written(), process=terminal.process)
        terminal.press("q")
        assert terminal.wait() == 0
    done = run("--disk-dir", str(server.disk_dir))
    assert (done.returncode, done.stdout) == (3, "")
    told(done.stderr)
