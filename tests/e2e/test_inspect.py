"""`inspect` on a running server, over `/admin`, and on the stopped store."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import golden, http
from tests.serving import Server, ask_store, running, tieredkv
from tests.waiting import wait_until

TEXT = "Quicksand and xylophones rarely meet in the same sentence. " * 8
KNOWN_MS = ("compute", "device", "host", "disk", "planned")


def complete(server: Server, prompt: str, **more: Any) -> dict[str, Any]:
    """Return how many tokens of a prompt were cached, by tier."""
    body = {"model": "tiny-random", "prompt": prompt, "max_tokens": 1, **more}
    answer = http.post(f"{server.url}/completions", json=body)
    assert answer.status_code == 200, answer.text
    details: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return details


def inspected(folder: Path, prompt: str, *flags: str) -> dict[str, Any]:
    """Return the report of the command line on a prompt, and check its predictions."""
    words = ["--disk-dir", str(folder), "--prompt-file", "-", "--json", *flags]
    done = tieredkv("inspect", *words, stdin=prompt)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("predicted_ttft_ms").keys() == {*KNOWN_MS}
    return found


def test_a_server_and_its_stopped_store_tell_of_a_prompt_and_of_a_chain(tmp_path: Path) -> None:
    flags = ("--device-size", "2MiB", "--host-size", "1MiB")
    with running(tmp_path, *flags) as server:
        folder, prompt = server.disk_dir, f"first {TEXT}"
        full = len(prompt) // 16 * 16
        assert inspected(folder, prompt)["reason"] == "never_seen"
        complete(server, prompt)
        for i in range(8):  # more than VRAM and host memory hold together
            complete(server, f"{i} {TEXT}")
        wait_until(lambda: server.df()["disk"]["blocks"] > 90, "nothing went to disk")
        told = inspected(folder, prompt)
        assert (told["prompt_tokens"], told["diverges_at"]) == (len(prompt), None)
        assert sum(told["by_tier"].values()) == full and told["by_tier"]["disk"] > 0
        url = f"{server.root}/admin/cache/inspect"
        over_http = http.post(url, json={"prompt": prompt}).json()
        assert over_http.pop("predicted_ttft_ms")["planned"] > 0
        assert over_http == told
        assert complete(server, prompt)["cached_tokens_by_tier"] == told["by_tier"]

        fork = inspected(folder, prompt[:100] + "?" + prompt[101:])
        assert (fork["diverges_at"], sum(fork["by_tier"].values())) == (96, 96)
        assert inspected(folder, prompt, "--cache-salt", "s")["reason"] == "other_namespace"
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert inspected(folder, json.dumps(chat))["reason"] == "never_seen"
        answer = http.post(
            f"{server.url}/chat/completions", json={**chat, "model": "tiny-random"}
        ).json()
        again = inspected(folder, json.dumps(chat["messages"]))
        assert again["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert sum(again["by_tier"].values()) == again["prompt_tokens"] // 16 * 16

        chains = ask_store(folder, "ls")["chains"]
        chain = next(it for it in chains if it["blocks_by_tier"]["disk"] == it["blocks"])
        assert (chain["model"], chain["tokens"]) == ("tiny-random", 16 * chain["blocks"])
        uses = ask_store(folder, "df", "-v")["namespaces"]
        assert {use["model"] for use in uses} == {"tiny-random"}
        in_ram = ask_store(folder, "ls", "--filter", "tier=host,model=tiny-random")["chains"]
        assert in_ram and all(each["blocks_by_tier"]["host"] for each in in_ram)
        listed = http.post(url.replace("inspect", "ls"), json={"filter": "size>1GB"}).json()
        assert listed == {"chains": []}
        refused = http.post(url.replace("inspect", "ls"), json={"filter": "sise>1GB"})
        assert refused.status_code == 400
        golden.told(refused.json()["error"]["message"])
        live = ask_store(folder, "inspect", chain["id"])["chain"]
        assert [block["position"] for block in live] == [*range(len(live))]
        assert http.post(url, json={"id": chain["id"]}).json()["chain"] == live
        missing = http.post(url, json={"id": "0" * 16})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_id")
        bodies: list[Any] = [
            {},
            {"id": "xyz"},
            {"prompt": 7},
            {"prompt": {}},
            {"prompt": "a", "id": "b"},
        ]
        for body in bodies:
            assert http.post(url, json=body).status_code == 400, body
        assert server.stop() == 0
        assert "Traceback" not in server.log and "Quicksand" not in server.log
    stopped = ask_store(folder, "inspect", chain["id"])["chain"]
    assert [block["block_hash"] for block in stopped] == [block["block_hash"] for block in live]
    assert {*map(str, stopped[0]["tiers"])} == {"disk"}
    told = inspected(folder, prompt, "--model", "tiny-random")
    assert told["by_tier"] == {"device": 0, "host": 0, "disk": full}
    salted = inspected(folder, prompt, "--model", "tiny-random", "--cache-salt", "s")
    assert (salted["diverges_at"], salted["reason"]) == (0, "other_namespace")
    never = inspected(folder, f"never {prompt}", "--model", "tiny-random")
    assert (never["diverges_at"], never["reason"]) == (0, "not_stored")
    done = tieredkv("inspect", "--disk-dir", str(folder), "--prompt-file", "-", stdin=prompt)
    assert done.returncode == 2
    golden.told(done.stderr)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"ab\xff")
    done = tieredkv("inspect", "--disk-dir", str(tmp_path), "--prompt-file", str(file))
    assert done.returncode == 2
    golden.told(done.stderr)


@pytest.mark.parametrize("flags", [(), ("--prompt-file", "-", "1234567890")])
def test_an_id_or_a_prompt_is_needed(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = tieredkv("inspect", "--disk-dir", str(tmp_path), *flags, stdin="a")
    assert done.returncode == 2
    golden.told(done.stderr)
