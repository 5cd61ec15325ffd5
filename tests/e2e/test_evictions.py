"""An operator evicts blocks of a server under load, and no answer changes."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import golden, http
from tests.serving import Server, ask_store, running, tieredkv
from tests.waiting import wait_until

TEXT = "Quicksand and xylophones rarely meet in the same sentence. " * 6
FILTERS: list[dict[str, Any]] = [
    {"all": True},
    {"all": True, "tiers": ["device"]},
    {"all": True, "tiers": ["host"]},
    {"all": True, "tiers": ["disk"]},
    {"filter": "tier=disk,idle<1h"},
    {"older_than_s": 0.0},
    {"all": True, "to": "host"},
    {"all": True, "to": "disk"},
]


def answer(server: Server, number: int) -> str:
    """Return the answer to one of four prompts, which share their beginning."""
    body = {
        "model": "tiny-random",
        "prompt": f"{TEXT}{number % 4}",
        "max_tokens": 12,
        "temperature": 0,
    }
    told = http.post(f"{server.url}/completions", json=body)
    assert told.status_code == 200, told.text
    text: str = told.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that writes its blocks to disk soon; it must end well."""
    flags = ("--device-size", "2MiB", "--host-size", "1MiB", "--disk-write", "write_behind")
    with running(tmp_path_factory.mktemp("evictions"), *flags) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log and "broken" not in server.log, server.log


def test_evictions_disturb_no_request_in_flight(server: Server) -> None:
    url = f"{server.root}/admin/cache/evict"
    right = [answer(server, number) for number in range(4)]
    is_over = threading.Event()

    def evict() -> list[int]:
        counts = [0] * len(FILTERS)
        for index in itertools.cycle(range(len(FILTERS))):
            if is_over.is_set():
                return counts
            told = http.post(url, json=FILTERS[index])
            assert told.status_code == 200, told.text
            counts[index] += told.json()["evicted_blocks"]
        raise AssertionError

    with ThreadPoolExecutor(5) as pool:
        evicting = pool.submit(evict)
        try:
            answers = [*pool.map(lambda number: answer(server, number), range(60))]
        finally:
            is_over.set()
        counts = evicting.result()
    assert answers == [right[number % 4] for number in range(60)]
    assert counts[0] > 0 and sum(counts[1:]) > 0, counts


def test_one_tier_is_emptied_and_the_others_keep_their_copies(server: Server) -> None:
    def cached() -> dict[str, int]:
        body = {"prompt": TEXT}
        told = http.post(f"{server.root}/admin/cache/inspect", json=body).json()
        by_tier: dict[str, int] = told["by_tier"]
        return by_tier

    http.post(f"{server.root}/admin/cache/evict", json={"all": True}).raise_for_status()
    answer(server, 0)
    full = len(TEXT) // 16 * 16
    wait_until(lambda: server.df()["disk"]["blocks"] * 16 >= full, "nothing went to disk")
    assert cached()["device"] > 0
    would = ask_store(server.disk_dir, "evict", "--tier", "device", "--dry-run")
    for tier in ("device", "host"):
        ask_store(server.disk_dir, "evict", "--tier", tier, "-y", exit_code=0)
    assert would["evicted_blocks"] * 16 >= full
    assert cached() == {"device": 0, "host": 0, "disk": full}
    [chain] = ask_store(server.disk_dir, "ls", "--filter", "tier=disk")["chains"]
    for which in ("--filter=tier=disk", chain["id"]):
        again = ask_store(server.disk_dir, "evict", which, "--tier", "device", "-y", exit_code=1)
        assert (again["evicted_blocks"], again["unknown_ids"]) == (0, [])
    assert chain["blocks_by_tier"]["device"] == 0
    nothing = ask_store(server.disk_dir, "evict", "--filter", "hits>99", "-y", exit_code=1)
    assert nothing["evicted_blocks"] == 0
    gone = ask_store(server.disk_dir, "evict", "--model", "tiny-random", "-y")
    assert gone["evicted_blocks"] == chain["blocks"]
    assert sum(cached().values()) == 0


def test_blocks_are_sent_to_slower_tiers(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        url = f"{server.root}/admin/cache"

        def cached(prompt: str) -> dict[str, int]:
            told = http.post(f"{url}/inspect", json={"prompt": prompt}).json()
            by_tier: dict[str, int] = told["by_tier"]
            return by_tier

        def ask(prompt: str, retention: str) -> int:
            body = {"model": "tiny-random", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            body["prompt_cache_retention"] = retention
            assert http.post(f"{server.url}/completions", json=body).status_code == 200
            return len(prompt) // 16 * 16

        kept, short = f"kept {TEXT}", f"short {TEXT}"
        num_kept, num_short = ask(kept, "24h"), ask(short, "in_memory")
        assert cached(kept)["device"] == num_kept
        sent = ask_store(server.disk_dir, "evict", "--all", "--to", "host", "-y")
        assert sent["evicted_blocks"] * 16 == num_kept + num_short
        for prompt, num in ((kept, num_kept), (short, num_short)):
            wait_until(lambda it=prompt, n=num: cached(it)["host"] == n, prompt)  # type: ignore[misc]
        sent = ask_store(server.disk_dir, "evict", "--all", "--to", "disk", "-y", exit_code=1)
        assert sent["evicted_blocks"] * 16 == num_kept
        assert sent["refused_blocks"] * 16 == num_short
        wait_until(lambda: cached(kept)["disk"] == num_kept, "nothing went to disk")
        assert cached(short) == {"device": 0, "host": num_short, "disk": 0}
        assert ask(kept, "24h") == num_kept and cached(kept)["device"] == num_kept
        bad = http.post(f"{url}/evict", json={"all": True, "to": "disk", "tiers": ["host"]})
        assert bad.status_code == 400
        nowhere = http.post(f"{url}/evict", json={"all": True, "to": "moon"})
        assert nowhere.status_code == 400
        assert server.stop() == 0
        assert "Traceback" not in server.log
    refused = tieredkv("evict", "--disk-dir", str(server.disk_dir), "--all", "--to", "host", "-y")
    assert refused.returncode == 1
    golden.told(refused.stderr)
