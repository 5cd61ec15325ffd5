"""Runs `tieredkv serve` as a real process in tests, and other commands beside it."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import openai

from tests import http
from tests.waiting import HANG_S, is_alive, wait_until

PYTHON = os.environ.get("TIEREDKV_TEST_PYTHON", sys.executable)  # it must have tieredkv installed
COMMAND = (PYTHON, "-P", "-m", "tieredkv")
SMALL = (
    *("--port", "0", "--disk-size", "256MiB", "--host-size", "8MiB", "--device-size", "8MiB"),
    *("--default-retention", "24h", "--restore", "load"),
)


def heed_ctrl_c() -> None:
    """Have a new process heed Ctrl-C, which one that a shell starts in the background ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Done(NamedTuple):
    """How a command ended, as `subprocess.CompletedProcess` tells it."""

    returncode: int
    stdout: str
    stderr: str


def tieredkv(*words: str, stdin: str = "", **environ: str) -> Done:
    """Run a command line in this process, which takes a tenth of the time of one of its own.

    Where the clients' environment runs the tests, the command needs a process of ours.
    """
    if sys.executable != PYTHON:
        env, command = {**os.environ, **environ}, [*COMMAND, *words]
        done = subprocess.run(command, input=stdin, env=env, capture_output=True, text=True)
        return Done(done.returncode, done.stdout, done.stderr)
    from tieredkv.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with (
        mock.patch.dict(os.environ, environ),
        mock.patch("sys.stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        return Done(main(words), out.getvalue(), err.getvalue())


def ask_store(folder: Path, verb: str, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """Run a command such as `df` on a store and return its JSON."""
    done = tieredkv(verb, "--disk-dir", str(folder), *arguments, "--json")
    assert done.returncode == exit_code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class Server:
    """One `tieredkv serve` process and its log.

    Args:
        folder: Folder for the log and, in `store`, the disk tier.
        flags: Flags after those of `base`; a later flag overrides an earlier one.
        model: The model to serve.
        base: The flags that most tests share.
        clock_offset_file: File with the seconds to add to the server's clock.
        has_disk: Whether the server has a disk tier.
        command: Starts tieredkv.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        model: str = "tiny-random",
        base: Sequence[str] = SMALL,
        clock_offset_file: Path | None = None,
        has_disk: bool = True,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.disk_dir = folder / "store"
        self._log = folder / f"log-{time.monotonic_ns()}"
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if clock_offset_file is not None:
            environ["TIEREDKV_TEST_CLOCK_OFFSET_FILE"] = str(clock_offset_file)
        where = ("--disk-dir", str(self.disk_dir))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "serve", model, *(where if has_disk else ()), *base, *flags],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environ,
            )
        try:
            said = re.compile(r"^tieredkv: serving `.*` at (\S+)$", re.MULTILINE)
            wait_until(
                lambda: said.search(self.log) is not None,
                "no server",
                process=self.process,
                log=lambda: self.log,
            )
        except BaseException:  # no caller has this object yet, so none can stop the process
            self.process.kill()
            self.process.wait()
            raise
        self.url = said.findall(self.log)[0]
        self.root = self.url.removesuffix("/v1")

    @property
    def log(self) -> str:
        """The text that the server has logged so far."""
        return self._log.read_text()

    def said(self, level: str, logger: str = "") -> list[str]:
        """Return the texts that a logger has logged at a level; the store's worker names none."""
        worker = "" if logger else r"store worker \d+ "
        name = rf"(?: engine)? {re.escape(logger)}" if logger else ""
        said = re.compile(rf"^\S+ \S+ {worker}{level}{name}: (.*)$", re.MULTILINE)
        return said.findall(self.log)

    def health(self) -> httpx.Response:
        """Ask `/health`."""
        return http.get(f"{self.root}/health")

    @property
    def pids(self) -> dict[str, int]:
        """The ids of the server's processes, by name."""
        pids: dict[str, int] = self.health().json()["pids"]
        return pids

    def df(self) -> dict[str, Any]:
        """Ask the store's worker what the tiers hold."""
        return ask_store(self.disk_dir, "df")

    def client(self, api_key: str = "any") -> openai.OpenAI:
        """Return a client of the server; the caller must close it."""
        return openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0)

    def stop(self) -> int:
        """Stop the server with SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL, and wait until they are gone."""
        pids = [pid for pid in self.pids.values() if pid]  # without a disk there is no worker
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "a process outlives kill -9")


@contextlib.contextmanager
def running(folder: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """Run a server while the context lasts, and kill it then."""
    server = Server(folder, *flags, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
