"""What operators see and set on a real server: metrics, keys, admin verbs, limits, shutdown."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import golden, http
from tests.serving import Server, ask_store, running
from tests.waiting import wait_until

MODEL = "tiny-random"
RUN = "tieredkv.server.run"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}
TEXT = "Xylophones and quicksand rarely meet in the same sentence. " * 8
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
LOGS = ("--log-level", "DEBUG")
VLLM = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds_count"),
)


def samples(server: Server) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return every sample of `/metrics` by name and labels."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(http.get(f"{server.root}/metrics").text):
        for each in family.samples:
            found.setdefault(each.name, {})[frozenset(each.labels.items())] = each.value
    return found


def value(server: Server, name: str, **labels: str) -> float:
    """Return the sum of a family's samples that have these labels."""
    of_family = samples(server).get(f"tieredkv_{name}", {})
    return sum(number for have, number in of_family.items() if labels.items() <= have)


def complete(server: Server, prompt: Any, **more: Any) -> httpx.Response:
    """Ask for a completion."""
    headers = more.pop("headers", {})
    body = {**GREEDY, "prompt": prompt, **more}
    return http.post(f"{server.url}/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server without keys that logs everything; it must end well."""
    folder = tmp_path_factory.mktemp("operations")
    with running(folder, *("--device-size", "2MiB", "--host-size", "2MiB"), *LOGS) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def test_metrics_follow_a_prompt_through_the_tiers(server: Server) -> None:
    prompt = f"tiers {TEXT}"
    before = value(server, "prompt_tokens_total")
    full = len(prompt) // 16 * 16
    for _ in range(2):
        assert complete(server, prompt).status_code == 200
    assert value(server, "prompt_tokens_total") == before + 2 * len(prompt)
    assert value(server, "cached_tokens_total", tier="device") >= full - 1
    assert value(server, "ttft_seconds_count", source="cold") >= 1
    assert value(server, "ttft_seconds_count", source="device") >= 1
    assert value(server, "itl_seconds_count") >= 6
    assert value(server, "answers_total", finished_reason="length") >= 2
    for i in range(8):  # more than VRAM and host memory hold together
        complete(server, f"{i} {TEXT}")
    wait_until(lambda: value(server, "tier_moves_total", to="disk") > 0, "nothing went to disk")
    for name, labels in (
        ("tier_moves_total", {"from": "device", "to": "host"}),
        ("tier_move_bytes_total", {"from": "host", "to": "disk"}),
        ("tier_move_seconds_count", {"from": "device", "to": "host"}),
        ("tier_move_seconds_sum", {"from": "host", "to": "disk"}),
        ("evictions_total", {"tier": "device", "reason": "capacity"}),
        ("disk_written_bytes_total", {}),
        ("computed_tokens_total", {}),
        ("step_seconds_count", {"computes": "prompts"}),
        ("step_seconds_sum", {"computes": "answers"}),
        ("step_error_seconds_total", {"computes": "answers"}),
        ("drain_timeout_seconds", {}),
        ("learnt_bytes_per_second", {"from": "host", "to": "disk"}),
        ("tier_blocks", {"tier": "disk"}),
        ("learnt_bytes_per_second", {"from": "disk", "to": "host"}),
        ("learnt_bytes_per_second", {"from": "host", "to": "device"}),
        ("learnt_prefill_tokens_per_second", {"position": "0"}),
    ):
        wait_until(lambda n=name, it=labels: value(server, n, **it) > 0, name)  # type: ignore[misc]
    usage = complete(server, prompt).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage["tieredkv"]["plan"]["split_token"] >= 0
    wait_until(lambda: value(server, "tier_moves_total", to="device") > 0, "nothing came up")
    for tiers in ({"from": "disk", "to": "host"}, {"from": "host", "to": "device"}):
        wait_until(lambda it=tiers: value(server, "tier_move_seconds_sum", **it) > 0, str(tiers))  # type: ignore[misc]


def test_the_names_that_routers_look_for_are_there(server: Server) -> None:
    complete(server, "a")
    found = samples(server)
    assert not [name for name in VLLM if f"vllm:{name}" not in found]
    [labels] = [dict(labels) for labels in found["vllm:cache_config_info"]]
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "64")
    queries = found["vllm:prefix_cache_queries_total"]
    assert sum(queries.values()) == value(server, "prompt_tokens_total")
    head = http.head(f"{server.root}/metrics")
    assert (head.status_code, head.text) == (200, "")


def test_labels_are_those_allowed_and_not_too_many(server: Server) -> None:
    for i in range(104):
        metadata = {"route": f"r{i}", "prefix_version": "v1", "user": "alice"}
        body = {**GREEDY, "max_tokens": 1, "prompt": "a", "metadata": metadata}
        http.post(f"{server.url}/completions", json=body)
    families = samples(server)["tieredkv_prompt_tokens_total"]
    routes = {dict(labels)["route"] for labels in families}
    assert "r1" in routes and "other" in routes
    assert len(families) <= 101
    assert {name for labels in families for name, _ in labels} == {"route", "prefix_version"}


def test_the_dashboard_names_only_metrics_that_exist(server: Server) -> None:
    complete(server, "a")
    known = set(re.findall(r"^# TYPE (\S+)", http.get(f"{server.root}/metrics").text, re.M))
    known |= {f"{name}_{suffix}" for name in known for suffix in ("bucket", "count", "sum")}
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    named = set(re.findall(r"tieredkv_\w+", DASHBOARD.read_text()))
    assert named - known == set()
    assert len(named) > 15


def test_neither_logs_nor_metrics_tell_what_was_asked(server: Server) -> None:
    secret = "my password is hunter2 and nobody must know it, " * 3
    assert complete(server, secret, metadata={"route": "secret-test"}).status_code == 200
    chat = {**GREEDY, "messages": [{"role": "user", "content": secret}], "stream": True}
    assert http.post(f"{server.url}/chat/completions", json=chat).status_code == 200
    ids = list(secret.encode())
    assert complete(server, ids).status_code == 200
    assert complete(server, [*ids, 70000]).status_code == 400
    told = server.log + http.get(f"{server.root}/metrics").text
    assert "hunter2" not in told
    assert ", ".join(map(str, ids[:6])) not in told
    assert not re.search(r"[0-9a-f]{64}", told), "a full hash"
    assert " DEBUG " in server.log


def test_operators_use_the_verbs_of_the_command_line(server: Server) -> None:
    url = f"{server.root}/admin/cache"
    complete(server, f"admin {TEXT}")
    df = http.post(f"{url}/df").json()
    assert df["device"]["blocks"] > 0 and df["disk"]["bytes_budget"] == 256 << 20
    assert df["writer_pid"] == server.df()["writer_pid"]
    assert "chains" in http.post(f"{url}/ls").json()
    assert http.post(f"{url}/verify").json()["bad"] == 0
    bodies: list[Any] = [{}, {"al": True}, {"all": "yes"}, [], {"ids": [[]]}]
    for body in bodies:
        refused = http.post(f"{url}/evict", json=body)
        assert (refused.status_code, set(refused.json())) == (400, {"error"}), body
    assert http.post(f"{url}/nothing").status_code == 404
    assert http.get(f"{url}/evict").status_code == 405
    assert http.post(f"{url}/evict", headers={"Origin": "http://evil"}).status_code == 403
    assert http.post(f"{url}/evict", json={"all": True}).json()["evicted_blocks"] > 0
    assert http.post(f"{url}/df").json()["disk"]["blocks"] == 0


def test_an_operator_inspects_and_evicts_on_a_server_without_a_disk(tmp_path: Path) -> None:
    with running(tmp_path, has_disk=False) as server:
        url = f"{server.root}/admin/cache"
        prompt = f"evict {TEXT}"
        assert complete(server, prompt).status_code == 200
        found = http.post(f"{url}/inspect", json={"prompt": prompt}).json()
        full = len(prompt) // 16 * 16
        assert found["by_tier"] == {"device": full - (full == len(prompt)), "host": 0, "disk": 0}
        salted = http.post(f"{url}/inspect", json={"prompt": prompt, "cache_salt": "s"}).json()
        assert (salted["diverges_at"], salted["reason"]) == (0, "other_namespace")
        assert http.post(f"{url}/inspect", json={"id": "0" * 16}).status_code == 404
        refused = http.post(f"{url}/inspect", json={"prompt": prompt, "tenant": "a" * 64})
        assert refused.status_code == 400
        golden.told(refused.json()["error"]["message"])
        assert http.post(f"{url}/df").json()["disk"] is None
        bodies: list[Any] = [{}, {"al": True}, {"dry_run": True}, {"ids": [[]]}]
        for body in bodies:
            assert http.post(f"{url}/evict", json=body).status_code == 400, body
        would = http.post(f"{url}/evict", json={"all": True, "dry_run": True}).json()
        assert would["evicted_blocks"] > 0
        unknown = http.post(f"{url}/evict", json={"ids": ["00ff"]}).json()
        assert (unknown["evicted_blocks"], unknown["unknown_ids"]) == (0, ["00ff"])
        told = http.post(f"{url}/evict", json={"all": True}).json()
        assert told == would and told["freed_bytes"] > 0
        again = complete(server, prompt).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["tieredkv"]["miss"]["reason"] == "admin"


def test_stored_responses_go_after_an_hour_by_eviction_and_at_a_restart(tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")

    def respond(server: Server, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "max_output_tokens": 4, "temperature": 0, **fields}
        return http.post(f"{server.url}/responses", json=body)

    def is_there(server: Server, id: str) -> bool:
        found = http.get(f"{server.url}/responses/{id}")
        assert found.status_code in (200, 404)
        return found.status_code == 200

    with running(tmp_path, clock_offset_file=offset) as server:
        first = respond(server, input=TEXT).json()
        more = {"input": "More.", "previous_response_id": first["id"]}
        second = respond(server, **more).json()
        details = second["usage"]["input_tokens_details"]
        prompt = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert details["cached_tokens"] == prompt // 16 * 16, "the conversation is found again"
        assert value(server, "stored_responses") == 2
        assert value(server, "stored_response_bytes") > len(TEXT)
        offset.write_text("3700")
        wait_until(lambda: not is_there(server, first["id"]), "it is kept for longer")
        assert respond(server, **more).status_code == 404
        third = respond(server, input=TEXT).json()
        assert is_there(server, third["id"])
        ask_store(server.disk_dir, "evict", "--all", "-y")
        wait_until(lambda: not is_there(server, third["id"]), "the command line spares it")
        fourth = respond(server, input=TEXT).json()
        assert server.stop() == 0
        assert "Xylophones" not in server.log
    with running(tmp_path, clock_offset_file=offset) as server:
        assert not is_there(server, fourth["id"])
        gone = respond(server, input="More.", previous_response_id=fourth["id"])
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "previous_response_not_found"


def test_long_headers_are_refused(server: Server) -> None:
    for headers in ({"x": "a" * 99_000}, {f"x{i}": "a" * 1000 for i in range(99)}):
        refused = http.post(f"{server.url}/completions", json=GREEDY, headers=headers)
        assert refused.status_code == 431
        assert refused.json()["error"]["code"] == "headers_too_large"


KEYS = """
[alice]
key = "sk-alice"
retention = "in_memory"

[bob]
key_sha256 = "{digest}"
share = 0.25

[operator]
key = "sk-root"
admin = true
"""


def test_a_file_of_keys_says_what_each_may_do(tmp_path: Path) -> None:
    digest = "3bd2b1b29e4ff3ed6fc3e7ee2a4f5b66e4a1e5a0b0f5b6f4d6bb5a2fa0b9b1aa"
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(KEYS.format(digest=digest))
    flags = ("--api-keys-file", str(file), "--metrics-key", "always")
    with running(tmp_path, *flags) as server:
        alice, root = ({"Authorization": f"Bearer sk-{who}"} for who in ("alice", "root"))
        prompt = f"keys {TEXT}"
        assert complete(server, prompt).status_code == 401
        assert complete(server, prompt, headers={"x-api-key": "sk-bob"}).status_code == 401
        for _ in range(2):
            warm = complete(server, prompt, headers=alice)
        assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        refused = complete(server, prompt, headers=alice, prompt_cache_retention="24h")
        assert refused.status_code == 400
        assert refused.json()["error"] == {
            "message": "This API key does not allow '24h' prompt caching.",
            "type": "invalid_request_error",
            "param": "prompt_cache_retention",
            "code": "invalid_parameter",
        }
        odd = complete(server, prompt, headers=alice, prompt_cache_retention=["24h"])
        assert odd.status_code == 400
        assert complete(server, "x", headers=root, prompt_cache_retention="24h").status_code == 200
        for path, method in (("/metrics", "GET"), ("/admin/cache/df", "POST")):
            asked = [
                http.request(method, server.root + path, headers=headers).status_code
                for headers in ({}, alice, root)
            ]
            assert asked == [401, 401, 200], path

        file.write_text('[carol]\nkey = "sk-carol"\n')
        server.process.send_signal(signal.SIGHUP)
        carol = {"Authorization": "Bearer sk-carol"}
        wait_until(
            lambda: complete(server, "x", headers=carol).status_code == 200, "not read again"
        )
        assert complete(server, "x", headers=alice).status_code == 401
        file.write_text("[carol]\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: bool(server.said("ERROR", RUN)), "a bad file is not reported")
        golden.told(server.said("ERROR", RUN)[-1])
        assert complete(server, "x", headers=carol).status_code == 200
        assert server.stop() == 0
        # The blocks kept `in_memory` are not on disk, though the server's default is `24h`.
        assert server.df()["disk"]["blocks"] == 0


@pytest.mark.slow
def test_a_long_shutdown_logs_its_progress(tmp_path: Path) -> None:
    flags = ("--disk-write-limit", "100KiB", "--drain-timeout", "5s")
    with running(tmp_path, *flags) as server:
        complete(server, TEXT * 6)
        assert server.stop() == 0
        golden.told(re.sub(r"\d+", "NUMBER", server.said("INFO", "tieredkv")[0]))
