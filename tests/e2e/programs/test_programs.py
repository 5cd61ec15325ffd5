"""Programs that people use, each in its own process, against a server whose model is scripted.

Each does a task of several turns: it calls two tools, which read and write a file, and ends with a
structured answer or a text. `make test` runs the packages of its own environment;
`make test-clients` installs all others first and says which it could not install.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.programs.recorder import Exchange, Recorder
from tests.e2e.programs.scripted_model import SMILE, Script, call, write_checkpoint
from tests.serving import running
from tests.waiting import HANG_S

HERE = Path(__file__).parent
BLOCK_SIZE = 16
NUM_OPENING = 8  # tokens behind the last message that open the answer, at most
BASE = ("--port", "0", "--device-size", "64MiB", "--host-size", "64MiB")
NOTE = "Write down a city with a lake."
CITY = {"name": "Bern", "population": 146_000}
DONE = f"All is done {SMILE}"
READ = "I read the note first.\n" + call("read_note", title="todo")
WRITE = call("write_note", title="answer", text="Zürich has a lake.")


def note_scripts() -> Iterator[Script]:
    """Yield the scripts of programs that have the tools of `notes.py`."""
    yield Script("notes", [READ, WRITE, json.dumps(CITY), DONE])


class Run(NamedTuple):
    """What a program did.

    Attributes:
        output: what it printed to stdout.
        exchanges: its requests to the model, and the answers.
        refused: the other hosts that it asked for.
    """

    output: str
    exchanges: Sequence[Exchange]
    refused: set[str]

    def check(
        self, num_answers: int, num_refused: int = 0, is_found_to_marks: bool = False
    ) -> None:
        """Check that no call became text, and that each turn found the one before it.

        Args:
            num_answers: of the model.
            num_refused: requests that the server refuses, after which the program goes on.
            is_found_to_marks: whether hits end at a mark (`cache_control`), not behind the answer.
        """
        assert "tool_call" not in self.output
        assert self.refused == set()
        usages = [it.usage for it in self.exchanges if it.status == 200]
        assert len(usages) == num_answers
        assert len(self.exchanges) == num_answers + num_refused
        for before, after in pairwise(usages):
            computed = before.prompt + before.answer - 1  # the last token is not in the cache
            if is_found_to_marks:
                computed = before.prompt - NUM_OPENING
            assert after.cached >= computed // BLOCK_SIZE * BLOCK_SIZE, usages


class Programs:
    """Runs programs.

    Attributes:
        folder: in which each program has a folder of its own, named as its script.
    """

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self.folder = folder
        self._recorder = recorder

    def run(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> Run:
        """Run a program in a fresh folder; it must succeed."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "todo.txt").write_text(NOTE)
        (folder / "answer.txt").unlink(missing_ok=True)
        home = self.folder / f"{name}-home"
        home.mkdir(exist_ok=True)
        proxy = self._recorder.root
        self._recorder.take(), self._recorder.take_refused()
        done = subprocess.run(
            command,
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "LANG": "C.UTF-8",
                "HOME": str(home),
                "TIEREDKV_URL": self._recorder.url,
                **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy),
                **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
                **(environ or {}),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANG_S,
            encoding="utf-8",
        )
        told = f"{done.stdout}\n{done.stderr}"
        exchanges = self._recorder.take()
        asked = [it.answer.decode() for it in exchanges if it.status != 200]
        assert done.returncode == 0, f"{told}\n{asked}"
        return Run(done.stdout, exchanges, self._recorder.take_refused())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Return what runs programs against one server for all tests."""
    folder = tmp_path_factory.mktemp("programs")
    model = folder / "checkpoint"
    write_checkpoint(model, [*note_scripts()])
    named = ("--served-model-name", "scripted")
    with (
        running(folder, *named, model=str(model), base=BASE, has_disk=False) as server,
        Recorder(server.root) as recorder,
    ):
        yield Programs(folder, recorder)
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def check_notes(programs: Programs, python: str, *command: str) -> Any:
    """Run a program with the tools of `notes.py`, and check what it did."""
    name, (module, *arguments) = "-".join(command), command
    run = programs.run(
        name,
        [python, "-m", f"tests.e2e.programs.{module}", *arguments],
        {"PYTHONPATH": str(HERE.parents[2])},
    )
    outcome = json.loads(run.output.splitlines()[-1])
    assert outcome["city"] == CITY
    assert (programs.folder / name / "answer.txt").read_text("utf-8") == "Zürich has a lake."
    return run, outcome["text"]


STRUCTURED = pytest.mark.xfail(reason="structured output", strict=True)


@pytest.mark.parametrize(
    "kind", ["chat", "stream", "responses", pytest.param("parse", marks=STRUCTURED)]
)
def test_openai_in_python(programs: Programs, kind: str) -> None:
    run, text = check_notes(programs, sys.executable, "openai_sdk", kind)
    run.check(num_answers=4)
    assert text == DONE


@pytest.mark.parametrize("kind", ["run", "stream"])
def test_anthropic_in_python(programs: Programs, kind: str) -> None:
    run, text = check_notes(programs, sys.executable, "anthropic_sdk", kind)
    # It asks first for a conversation that the server keeps.
    run.check(num_answers=4, num_refused=1, is_found_to_marks=True)
    assert text == DONE
