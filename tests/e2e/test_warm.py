"""`tieredkv warm` against a real server: what it sends is found by the requests after it."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import golden
from tests.serving import COMMAND, Server, heed_ctrl_c, running, tieredkv
from tests.waiting import wait_until

TEXT = "All requests begin with these instructions, which are long enough for some blocks. " * 3
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": TEXT + "A completion."},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT + "A chat."}]},
    "/v1/responses": {"input": TEXT + "A response.", "prompt_cache_key": "k"},
    "/v1/messages": {
        "system": TEXT,
        "messages": [{"role": "user", "content": "A message."}],
        "max_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server."""
    with running(tmp_path_factory.mktemp("warm")) as server:
        yield server


def warm(*words: str, exit_code: int = 0, stdin: str = "") -> Any:
    """Run the command; return its JSON, or what it complains of."""
    done = tieredkv("warm", *words, "--json", stdin=stdin)
    assert done.returncode == exit_code, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else done.stderr


def as_lines(bodies: Any) -> str:
    return "".join(json.dumps(body) + "\n" for body in bodies)


def test_prompts_of_each_api_are_found_afterwards(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n" + as_lines([TEXT + "A text.", *BODIES.values()]))
    before = warm(str(file), "--url", server.root)
    assert (before["prompts"], before["sent"], before["failed"]) == (5, 5, {})
    assert before["cached_tokens"] < before["prompt_tokens"] / 2, "they share some blocks"
    again = warm(str(file), "--url", server.root)
    assert again["prompt_tokens"] == before["prompt_tokens"]
    assert again["cached_tokens"] > 0.9 * again["prompt_tokens"] - 5 * 16
    for path, body in BODIES.items():
        asked = {"model": "tiny-random", "max_tokens": 1, **body}
        asked.pop("max_tokens") if path == "/v1/responses" else None
        usage = httpx.post(server.root + path, json=asked, timeout=60).json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
        assert cached > 200, (path, usage)


def test_what_the_server_refuses_is_told_by_its_line(server: Server) -> None:
    bodies = ["Once upon a time.", {"prompt": "x", "temperature": -1}, {"prompt": ["a", "b"]}]
    told = warm("-", "--url", server.root, exit_code=1, stdin=as_lines(bodies))
    assert told["sent"] == 3 and [*told["failed"]] == ["2"]
    golden.told(told["failed"]["2"])
    refused = warm("-", "--url", server.root, "--retention", "7d", stdin='"x"', exit_code=1)
    golden.told(refused["failed"]["1"])


@pytest.mark.parametrize(
    ("lines", "words", "exit_code"),
    [
        ('"a"\n{"text": "b"}\n', (), 2),
        ('"a"\n{"prompt": \n', (), 2),
        (as_lines([BODIES["/v1/messages"]]), ("--retention", "24h"), 2),
        ("\n", (), 2),
        ('"a"', ("--url", "http://[::1"), 3),
        ('"a"', ("--url", "http://127.0.0.1:1"), 3),
    ],
    ids=["text", "cut", "retention", "empty", "malformed", "nobody"],
)
def test_bad_input_is_refused_before_anything_is_sent(
    lines: str, words: tuple[str, ...], exit_code: int
) -> None:
    complaint = warm("-", *words, exit_code=exit_code, stdin=lines)
    golden.told(re.sub("(does not answer:).*", r"\1 CAUSE", complaint))


def test_ctrl_c_ends_it_with_the_figures_so_far(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(as_lines(f"{i} {TEXT}" for i in range(3000)))

    def num_answers() -> float:
        lines = httpx.get(f"{server.root}/metrics").text.splitlines()
        return sum(float(it.split()[-1]) for it in lines if it.startswith("tieredkv_answers_total"))

    before = num_answers()
    words = [*COMMAND, "warm", str(file), "--url", server.root, "--jobs", "1", "--json"]
    pipe = subprocess.PIPE
    warming = subprocess.Popen(words, stdout=pipe, text=True, preexec_fn=heed_ctrl_c)
    wait_until(lambda: num_answers() >= before + 2, "no prompt was computed")
    warming.send_signal(signal.SIGINT)
    told = json.loads(warming.communicate()[0].splitlines()[-1])
    assert warming.returncode == 1
    assert 0 < told["sent"] < told["prompts"] == 3000
