"""A server records its requests, and a replay of the recording finds what the server has found."""

import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests import golden, http
from tests.levels import few
from tests.serving import running
from tests.waiting import HANG_S
from tieredkv.cli.main import main

TENANTS = ("sk-of-the-first-tenant", "sk-of-the-second-tenant")
KEYS = [part for key in TENANTS for part in ("--api-key", key)]
WORDS = ("xylophone", "quicksand", "marmalade", "turbulence", "kaleidoscope", "zeppelin")
TOKEN_BYTES = 2048  # of tiny-random


PAUSE_S = 700
"""Longer than `in_memory` blocks live unused."""

BY_DEFAULT = [(None,) * 4] * 4
MIXED = [
    ("24h",) * 4,
    ("in_memory",) * 4,
    ("in_memory", "24h", "in_memory", "in_memory"),
    ("24h", "in_memory", "in_memory", None),
]
"""Retention of each conversation's turns."""


def converse(url: str, retentions: Sequence[Sequence[str | None]], clock: Path) -> Counter[str]:
    """Have each tenant hold two conversations in turns; return the tokens that usage counts.

    The clock is turned before the third turn.
    """
    generator, found = random.Random(5), Counter[str]()
    chats: list[tuple[str, list[dict[str, str]]]] = [
        (key, [{"role": "system", "content": " ".join(generator.choices(WORDS, k=30))}])
        for key in TENANTS * 2
    ]
    for turn, names in enumerate(zip(*retentions, strict=True)):
        clock.write_text(str(PAUSE_S if turn > 1 else 0))
        for (key, messages), name in zip(chats, names, strict=True):
            text = " ".join(generator.choices(WORDS, k=generator.randrange(5, 40)))
            messages.append({"role": "user", "content": text})
            body = {"model": "tiny-random", "messages": messages, "max_tokens": 20}
            if name is not None:
                body["prompt_cache_retention"] = name
            headers = {"Authorization": f"Bearer {key}"}
            answer = http.post(f"{url}/chat/completions", json=body, headers=headers).json()
            messages.append(answer["choices"][0]["message"])
            usage = answer["usage"]
            found["prompt"] += usage["prompt_tokens"]
            found.update(usage["prompt_tokens_details"]["cached_tokens_by_tier"])
    return found


@pytest.mark.parametrize(
    ("sizes", "retentions"),
    few(
        [
            (("4MiB", "64MiB", "256MiB"), MIXED),
            (("4MiB", "64MiB", "256MiB"), BY_DEFAULT),
            (("64MiB", "1MiB", "0"), BY_DEFAULT),
        ]
    ),
    ids=["mixed", "all-tiers", "vram"],
)
def test_a_replay_finds_what_the_server_has_found(
    sizes: tuple[str, str, str],
    retentions: Sequence[Sequence[str | None]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, clock, (vram, host, disk) = tmp_path / "trace.jsonl", tmp_path / "clock", sizes
    clock.write_text("0")
    flags = ["--record", str(path), "--device-size", vram, "--host-size", host, *KEYS]
    with running(tmp_path, *flags, has_disk=disk != "0", clock_offset_file=clock) as server:
        found = converse(server.url, retentions, clock)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(HANG_S) == 0
        golden.told(server.said("INFO", "tieredkv.server.recorder")[-1])
    asked = ["--vram", vram, "--host", host, "--disk", disk, "--bytes-per-token", str(TOKEN_BYTES)]
    assert main(["replay", str(path), *asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["requests"], document["prompt_tokens"]) == (16, found["prompt"])
    by_tier = document["by_tier"]
    names = (name or "24h" for name in chain(*retentions))
    assert document["requests_by_retention"] == Counter(names)
    assert (document["expired_blocks"] > 0) == (retentions is MIXED)
    assert sum(by_tier.values()) == found["device"] + found["host"] + found["disk"]
    assert sum(by_tier.values()) > found["prompt"] // 2
    if vram == "4MiB":  # a server gives requests that take much of VRAM their room in turns
        assert by_tier["host"] > 0 < found["host"]
    else:
        assert by_tier["device"] == found["device"]
    _tells_nothing(path)


def _tells_nothing(path: Path) -> None:
    """Check that a recording has the fields that it may have, and nothing of its requests."""
    content = path.read_text()
    assert content.endswith("}\n")
    for secret in (*TENANTS, *WORDS, "tiny-random", "user", "system"):
        assert secret not in content
    numbers: set[Any] = set()
    for line in map(json.loads, content.splitlines()):
        assert line.keys() <= {
            *("timestamp", "input_length", "output_length", "hash_ids", "answer_hash_ids"),
            *("block_tokens", "retention"),
        }
        numbers.update(line["hash_ids"], line.get("answer_hash_ids", ()))
    assert min(numbers) > 1 << 32, "an id is no token"


def test_a_server_does_not_start_with_a_recording_that_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    assert main(["serve", "tiny-random", "--port", "0", "--record", str(path)]) == 2
    golden.told(capsys.readouterr().err)
    assert path.read_text() == "mine"
