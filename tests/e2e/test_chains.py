"""An operator lists and evicts chains of every tier, with and without a disk."""

from pathlib import Path
from typing import Any

import pytest

from tests import golden, http
from tests.levels import few
from tests.serving import Server, ask_store, running
from tests.waiting import wait_until
from tieredkv.operate.evict import SUMMED

SHARED = "Quicksand and xylophones rarely meet in the same sentence. " * 3
SHORT, KEPT = "short", "kept"


def complete(server: Server, prompt: str, retention: str) -> int:
    """Have a prompt computed; return how many full blocks it has."""
    body = {"model": "tiny-random", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body["prompt_cache_retention"] = retention
    assert http.post(f"{server.url}/completions", json=body).status_code == 200
    return len(prompt) // 16


def ask(server: Server, verb: str, **body: Any) -> dict[str, Any]:
    """Ask over HTTP."""
    told = http.post(f"{server.root}/admin/cache/{verb}", json=body)
    assert told.status_code == 200, told.text
    answer: dict[str, Any] = told.json()
    return answer


def listed(server: Server, **body: Any) -> dict[str, dict[str, Any]]:
    """Return the chains that `ls` lists, by their retention."""
    chains = ask(server, "ls", **body)["chains"]
    assert len({chain["id"] for chain in chains}) == len(chains)
    return {chain["retention"]: chain for chain in chains}


def test_chains_are_listed_and_evicted_without_a_disk(tmp_path: Path) -> None:
    with running(tmp_path, has_disk=False) as server:
        assert ask(server, "ls") == {"chains": []}
        num_blocks = {
            "in_memory": complete(server, SHARED + 5 * "a short one ", "in_memory"),
            "24h": complete(server, SHARED + 5 * "a longer one ", "24h"),
        }
        chains = listed(server)
        assert {each: chains[each]["blocks"] for each in chains} == num_blocks
        for chain in chains.values():
            assert chain["blocks_by_tier"] == {"device": chain["blocks"], "host": 0, "disk": 0}
            assert (chain["model"], chain["tokens"]) == ("tiny-random", 16 * chain["blocks"])
            assert chain["stored_bytes"] == 0 < chain["bytes"]
            shown = ask(server, "inspect", id=chain["id"])["chain"]
            assert [block["position"] for block in shown] == [*range(chain["blocks"])]
        assert [*listed(server, limit=1)] == ["24h"]
        assert [*listed(server, sort="tokens", limit=1)] == ["in_memory"]
        assert listed(server, filter="tier=disk") == {}
        bad = http.post(f"{server.root}/admin/cache/ls", json={"filter": "sze>1"})
        assert bad.status_code == 400
        golden.told(bad.json()["error"]["message"])
        assert ask(server, "evict", model="another")["evicted_blocks"] == 0
        nothing = ask(server, "evict", filter="tier=disk")
        assert (nothing["evicted_blocks"], nothing["unknown_ids"]) == (0, [])
        own = num_blocks["in_memory"] - len(SHARED) // 16
        would = ask(server, "evict", filter="retention=in_memory", dry_run=True)
        gone = ask(server, "evict", filter="retention=in_memory", model="tiny-random")
        assert would["evicted_blocks"] == gone["evicted_blocks"] == own
        [left] = listed(server).values()
        assert left["blocks"] == num_blocks["24h"]
        assert left["id"].split("-")[1] == chains["24h"]["id"].split("-")[1]
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("encryption", few(["on", "off"]))
def test_chains_of_all_tiers_are_listed_once(tmp_path: Path, encryption: str) -> None:
    flags = ("--disk-write", "write_behind", "--disk-encryption", encryption)
    with running(tmp_path, *flags) as server:
        num_short = complete(server, f"{SHORT} {SHARED}", "in_memory")
        num_kept = complete(server, f"{KEPT} {SHARED}", "24h")
        wait_until(lambda: server.df()["disk"]["blocks"] == num_kept, "nothing went to disk")
        ask(server, "evict", all=True, to="host")
        complete(server, f"{KEPT} {SHARED}", "24h")
        wait_until(lambda: server.df()["host"]["blocks"] == num_short + num_kept, "no copies")
        chains = listed(server)
        assert [*chains] == ["24h", "in_memory"]
        everywhere = dict.fromkeys(("device", "host", "disk"), num_kept)
        assert chains["24h"]["blocks_by_tier"] == everywhere
        assert chains["24h"]["blocks"] == num_kept
        short = chains["in_memory"]
        assert short["blocks_by_tier"] == {"device": 0, "host": num_short, "disk": 0}
        assert short["stored_bytes"] == 0 and short["model"] == "tiny-random"
        assert [*listed(server, filter="tier=disk")] == ["24h"]
        for chain in chains.values():
            shown = ask(server, "inspect", id=chain["id"])["chain"]
            assert [block["position"] for block in shown] == [*range(chain["blocks"])]
            assert ask(server, "inspect", id=chain["id"].split("-")[1])["chain"] == shown
        would = ask_store(server.disk_dir, "evict", "--filter", "tier!=disk", "--dry-run")
        assert (would["evicted_blocks"], would["unknown_ids"]) == (num_short, [])
        gone = ask_store(server.disk_dir, "evict", "--filter", "retention=in_memory", "-y")
        assert (gone["evicted_blocks"], gone["unknown_ids"]) == (num_short, [])
        assert gone["disk"]["evicted_blocks"] == 0
        [left] = listed(server).values()
        assert (left["id"], left["blocks_by_tier"]) == (chains["24h"]["id"], everywhere)
        complete(server, f"{SHORT} {SHARED}", "in_memory")
        gone = ask(server, "evict", ids=[listed(server)["in_memory"]["id"]])
        assert (gone["evicted_blocks"], gone["unknown_ids"]) == (num_short, [])
        assert ask(server, "prune")["pruned_blocks"] == 0
        would = ask_store(server.disk_dir, "evict", chains["24h"]["id"], "--dry-run")
        gone = ask(server, "evict", filter="tier=device,tier=disk")
        assert (gone["evicted_blocks"], gone["disk"]["evicted_blocks"]) == (3 * num_kept, num_kept)
        in_ram = gone["freed_bytes"] - gone["disk"]["freed_bytes"]
        assert in_ram == 2 * chains["24h"]["bytes"], "copies in VRAM and host memory count each"
        assert {key: would[key] for key in SUMMED} == {key: gone[key] for key in SUMMED}
        assert listed(server) == {}
        complete(server, f"{SHORT} {SHARED}", "in_memory")
        complete(server, f"{KEPT} {SHARED}", "24h")
        assert server.stop() == 0
        assert "Traceback" not in server.log
    [chain] = ask_store(server.disk_dir, "ls")["chains"]
    assert chain["blocks_by_tier"] == {"device": 0, "host": 0, "disk": num_kept}


def test_hits_are_the_requests_that_found_a_chain_in_any_tier_and_after_a_stop(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "--disk-write", "write_behind") as server:

        def hits() -> int:
            [chain] = listed(server).values()
            return int(chain["hits"])

        num_blocks = complete(server, f"{KEPT} {SHARED}", "24h")
        wait_until(lambda: server.df()["disk"]["blocks"] == num_blocks, "nothing went to disk")
        assert hits() == 0
        for num in (1, 2):
            complete(server, f"{KEPT} {SHARED}", "24h")
            wait_until(lambda num=num: hits() == num, f"hit {num}")  # type: ignore[misc]
        for tier in ("device", "host"):
            ask(server, "evict", all=True, tiers=[tier])
        wait_until(lambda: hits() == 2, "the disk was not told of the hits")
        complete(server, f"{KEPT} {SHARED}", "24h")
        wait_until(lambda: hits() == 3, "the hit on disk is not counted once")
        disk_dir = server.disk_dir
    [chain] = ask_store(disk_dir, "ls")["chains"]
    assert chain["hits"] == 3
