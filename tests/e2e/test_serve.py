"""`tieredkv serve` as users see it: real processes, the openai client, signals and kill -9."""

import errno
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import golden, http
from tests.golden import refused
from tests.serving import Server, running, tieredkv
from tests.storage.fuse import FaultyDisk, mounted_faulty_disk
from tests.waiting import HANG_S, is_alive, wait_until

MODEL = "tiny-random"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
TEXT = "The cache keeps what it promised. " * 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with two tenants; it must end well."""
    folder = tmp_path_factory.mktemp("serve")
    with running(folder, "--api-key", "sk-a", "--api-key", "sk-b") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log
        assert TEXT[:20] not in server.log, "a prompt is in the log"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Return the first tenant's client."""
    with server.client("sk-a") as client:
        yield client


@pytest.fixture
def faulty_disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    """Return a disk that fails on demand."""
    with mounted_faulty_disk(tmp_path) as disk:
        yield disk


def details(usage: Any) -> dict[str, Any]:
    """Return the prompt details of a usage as a dict."""
    answer: dict[str, Any] = usage.prompt_tokens_details.model_dump()
    return answer


def test_a_repeated_prompt_is_served_from_vram_with_the_same_text(client: openai.OpenAI) -> None:
    prompt = f"vram {TEXT}"
    cold = client.completions.create(**GREEDY, prompt=prompt)
    warm = client.completions.create(**GREEDY, prompt=prompt)
    assert cold.usage is not None and warm.usage is not None
    assert cold.choices[0].text == warm.choices[0].text
    assert len(cold.choices[0].text) == 6
    assert cold.choices[0].finish_reason == "length"
    assert cold.usage.prompt_tokens == len(prompt)
    assert cold.usage.total_tokens == len(prompt) + 6
    full = len(prompt) // 16 * 16
    assert details(cold.usage)["cached_tokens"] == 0
    assert details(cold.usage)["cache_write_tokens"] == full
    assert details(warm.usage)["cached_tokens"] == full
    assert details(warm.usage)["cached_tokens_by_tier"] == {"device": full, "host": 0, "disk": 0}


def test_every_form_of_prompt_gets_its_answers_in_order(client: openai.OpenAI) -> None:
    texts = ["one", "two"]
    ids = [list(text.encode()) for text in texts]
    by_text = client.completions.create(**GREEDY, prompt=texts)
    by_ids = client.completions.create(**GREEDY, prompt=ids)
    singles = [client.completions.create(**GREEDY, prompt=each).choices[0].text for each in ids]
    assert [choice.text for choice in by_text.choices] == singles
    assert [choice.text for choice in by_ids.choices] == singles
    assert [choice.index for choice in by_ids.choices] == [0, 1]
    assert by_ids.usage is not None
    assert (by_ids.usage.prompt_tokens, by_ids.usage.completion_tokens) == (6, 12)
    echoed = client.completions.create(**GREEDY, prompt="one", echo=True)
    assert echoed.choices[0].text == "one" + singles[0]


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"stream {TEXT}"}]
    whole = client.chat.completions.create(**GREEDY, messages=messages)
    chunks = list(
        client.chat.completions.create(
            **GREEDY, messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    *content, last, usage = chunks
    assert content[0].choices[0].delta.model_dump(exclude_none=True) == {
        "role": "assistant",
        "content": "",
    }
    text = "".join(chunk.choices[0].delta.content or "" for chunk in content)
    assert text == whole.choices[0].message.content
    assert len(content) == 1 + 6
    assert last.choices[0].delta.model_dump(exclude_none=True) == {}
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens
    assert details(usage.usage)["cached_tokens"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_the_bytes_of_a_stream_are_events_and_done(server: Server) -> None:
    body = {**GREEDY, "prompt": "x", "stream": True}
    response = http.post(
        f"{server.url}/completions", json=body, headers={"Authorization": "Bearer sk-a"}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"]
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len(parsed) == 6
    assert [event["choices"][0]["finish_reason"] for event in parsed] == [None] * 5 + ["length"]
    assert all("usage" not in event for event in parsed)


def test_stop_strings_end_the_text_before_themselves(client: openai.OpenAI) -> None:
    free = client.completions.create(**GREEDY, prompt="stop here").choices[0].text
    stopped = client.completions.create(**GREEDY, prompt="stop here", stop=free[2:4])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free[: free.index(free[2:4])]


def test_answers_differ_by_seed_and_repeat_with_it(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "dice"}]}]

    def ask(**more: Any) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=8, n=3, **more
        )
        return [choice.message.content for choice in answer.choices]

    assert ask(seed=5) == ask(seed=5)
    assert len(set(ask(seed=5))) == 3
    assert ask() != ask()


def test_logprobs_come_in_both_shapes(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "log"}]
    chat = client.chat.completions.create(
        **GREEDY, messages=messages, logprobs=True, top_logprobs=2
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == chat.choices[0].message.content
    for token in logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2
    old = client.completions.create(**GREEDY, prompt="log", logprobs=1).choices[0].logprobs
    assert old is not None
    assert old.text_offset == list(range(6))
    assert len(old.tokens or ()) == len(old.token_logprobs or ()) == 6


def test_retention_is_accepted_and_checked(client: openai.OpenAI) -> None:
    for value in ("in_memory", "24h", "in-memory"):
        client.completions.create(
            **GREEDY, prompt="keep", extra_body={"prompt_cache_retention": value}
        )
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            **GREEDY, prompt="keep", extra_body={"prompt_cache_retention": "48h"}
        )
    assert caught.value.body == {
        "message": "Invalid value: '48h'. Supported values are: 'in_memory' and '24h'.",
        "type": "invalid_request_error",
        "param": "prompt_cache_retention",
        "code": "invalid_value",
    }


def test_tenants_and_salts_are_apart(server: Server, client: openai.OpenAI) -> None:
    prompt = f"mine {TEXT}"
    client.completions.create(**GREEDY, prompt=prompt)

    def cached(client: openai.OpenAI, **more: Any) -> int:
        usage = client.completions.create(**GREEDY, prompt=prompt, **more).usage
        count: int = details(usage)["cached_tokens"]
        return count

    with server.client("sk-b") as other:
        assert cached(other) == 0
    assert cached(client, extra_body={"cache_salt": "s"}) == 0
    assert cached(client, extra_body={"cache_salt": "s"}) > 0
    assert cached(client) > 0


def test_models_name_the_context_length(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 4096
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.code == "model_not_found"


def test_requests_that_cannot_be_served_have_their_status(
    server: Server, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="gpt", prompt="a")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(**GREEDY, prompt="a" * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with refused(openai.BadRequestError, param="prompt"):
        client.completions.create(**GREEDY, prompt="")
    with refused(openai.BadRequestError, param="prompt"):
        client.completions.create(**GREEDY, prompt=[999])
    with refused(openai.BadRequestError, param="n"):
        client.completions.create(**GREEDY, prompt=["a"] * 11, n=128)
    with server.client("wrong") as stranger, pytest.raises(openai.AuthenticationError) as key:
        stranger.models.list()
    assert key.value.code == "invalid_api_key"
    headers = {"Authorization": "Bearer sk-a"}
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("HEAD", "/health", 200),
    ):
        assert http.request(method, server.root + path, headers=headers).status_code == status
    missing = http.post(f"{server.url}/chat/completions", content=b"{", headers=headers)
    assert missing.status_code == 400
    golden.told(missing.json()["error"]["message"])
    body = {"model": "tiny-random", "prompt": "a" * (33 << 20)}
    huge = http.post(f"{server.url}/completions", json=body, headers=headers)
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "request_too_large")


def test_a_client_that_leaves_takes_its_request_with_it(
    server: Server, client: openai.OpenAI
) -> None:
    def num_cancelled() -> int:
        text = http.get(f"{server.root}/metrics").text
        found = re.findall(r'tieredkv_answers_total{finished_reason="cancelled"} (\d+)', text)
        return sum(map(int, found))

    before = num_cancelled()
    long: dict[str, Any] = {**GREEDY, "max_tokens": 3500, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**long, prompt="leave", stream=True) as stream:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**long, prompt="leave", timeout=0.5)
    wait_until(lambda: num_cancelled() == before + 2, "they were answered in whole")
    wait_until(lambda: server.df()["counters"]["requests_running"] == 0, "the engine goes on")


def check_bodies_take_places(server: Server) -> None:
    """Check that requests are refused before they are read while others' bodies are not there."""

    def complete() -> httpx.Response:
        return http.post(f"{server.url}/completions", json={**GREEDY, "prompt": "a"})

    port = int(server.root.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n"
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for sock in idle:
        sock.sendall(head + b"{")
    wait_until(lambda: complete().status_code == 429, "nobody is refused")
    refused = complete()
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert server.health().status_code == 200
    assert http.post(f"{server.root}/admin/cache/df").status_code == 200
    for sock in idle:
        sock.close()
    wait_until(lambda: complete().status_code == 200, "the places are not free again")


def test_a_full_queue_is_429_and_sigterm_ends_streams_and_writes_what_was_promised(
    tmp_path: Path,
) -> None:
    prompt = f"restart {TEXT}"
    with running(tmp_path, "--max-num-seqs", "1", "--max-num-queued-reqs", "1") as server:
        check_bodies_take_places(server)
        with server.client() as client:
            client.completions.create(**GREEDY, prompt=prompt)
        long = {**GREEDY, "max_tokens": 3500, "ignore_eos": True, "stream": True, "prompt": "a"}
        results: list[httpx.Response] = []

        def post() -> None:
            body = {**long, "stream": False}
            results.append(http.post(f"{server.url}/completions", json=body))

        threads = [threading.Thread(target=post) for _ in range(3)]
        with http.stream("POST", f"{server.url}/completions", json=long) as stream:
            for thread in threads:
                thread.start()
            wait_until(lambda: len(results) >= 2, "no 429")
            for refused in results[:2]:
                assert refused.status_code == 429
                assert refused.headers["retry-after"]
                assert refused.json()["error"]["code"] == "queue_full"
            server.process.send_signal(signal.SIGTERM)
            events = "".join(stream.iter_text()).strip().split("\n\n")
            for thread in threads:
                thread.join()
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert results[2].status_code == 503
        assert server.process.wait(HANG_S) == 0
        assert "Traceback" not in server.log, server.log
        assert server.df()["disk"]["blocks"] >= len(prompt) // 16


@pytest.mark.slow
def test_sigterm_keeps_the_cache_for_the_next_server(tmp_path: Path) -> None:
    prompt = f"restart {TEXT}"
    with running(tmp_path) as server, server.client() as client:
        cold = client.completions.create(**GREEDY, prompt=prompt)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG_S) == 0
    with running(tmp_path) as server, server.client() as client:
        warm = client.completions.create(**GREEDY, prompt=prompt)
        assert warm.choices[0].text == cold.choices[0].text
        by_tier = details(warm.usage)["cached_tokens_by_tier"]
        assert by_tier == {"device": 0, "host": 0, "disk": len(prompt) // 16 * 16}


def test_a_dead_worker_is_replaced_its_trouble_told_and_a_dead_server_takes_its_engine_along(
    tmp_path: Path,
) -> None:
    prompt = f"killed {TEXT}"
    with running(tmp_path) as server, server.client() as client:
        client.completions.create(**GREEDY, prompt=prompt)
        assert server.health().json()["disk"] == {"status": "ok"}
        worker = server.pids["worker"]
        os.kill(worker, signal.SIGSTOP)
        index = server.disk_dir / "index" / "data.mdb"
        data = index.read_bytes()
        with index.open("r+b") as file:
            for page in (0, 4096):
                file.seek(page + 20)
                file.write((99).to_bytes(4, "little"))
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: " 99, " in server.health().json()["disk"].get("cause", ""), "no cause")
        health = server.health()
        cause = health.json()["disk"]["cause"]
        golden.told(cause)
        assert (health.status_code, health.json()["disk"]["status"]) == (200, "off")
        assert client.completions.create(**GREEDY, prompt="a").choices
        for verb in ("df", "doctor"):
            told = tieredkv(verb, "--disk-dir", str(server.disk_dir))
            assert told.returncode == 1
            assert cause in " ".join((told.stdout + told.stderr).split())
        index.write_bytes(data)
        wait_until(lambda: server.health().json()["disk"] == {"status": "ok"}, "it stays off")
        assert server.pids["worker"] not in (None, worker)
        client.completions.create(**GREEDY, prompt="after the worker's death")

        pids = server.pids
        os.kill(pids["server"], signal.SIGKILL)
        wait_until(lambda: not is_alive(pids["engine"]), "the engine outlives its server")
        df = server.df()
        assert df["writer_pid"] is None
        assert df["disk"]["blocks"] >= len(prompt) // 16


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def descendants(pid: int) -> list[int]:
    of_threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(each) for path in of_threads for each in path.read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]


def test_a_dead_engine_ends_the_server_once_its_clients_were_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDKV_API_KEYS", "sk-a")
    monkeypatch.setenv("TIEREDKV_ADMIN_KEY", "sk-root")
    endless: dict[str, Any] = {**GREEDY, "max_tokens": 3500, "extra_body": {"ignore_eos": True}}
    with running(tmp_path) as server, server.client("sk-a") as client:
        pids = server.pids
        children = descendants(pids["server"])
        assert {pids["engine"], pids["worker"]} <= {*children}
        for pid in children:
            given = environment_of(pid)
            assert "PATH" in given and not any("sk-" in each for each in given.values())
        stream = client.completions.create(**endless, prompt="a", stream=True)
        next(iter(stream))
        told: list[openai.APIStatusError] = []

        def ask() -> None:
            try:
                client.completions.create(**endless, prompt="b")
            except openai.APIStatusError as error:
                told.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: running_requests(server) == 2, "it does not run")
        os.kill(pids["engine"], signal.SIGKILL)
        with refused(openai.APIError, code="engine_dead"):
            list(stream)
        asking.join()
        assert [(error.status_code, error.code) for error in told] == [(503, "engine_dead")]
        assert server.process.wait(HANG_S) == 1
        golden.told(server.said("ERROR", "tieredkv.server.engine_client")[-1])
        assert "Traceback" not in server.log and "sk-" not in server.log


def running_requests(server: Server) -> int:
    """Return how many requests run, by the metrics of the server."""
    headers = {"Authorization": "Bearer sk-root"}
    text = http.get(f"{server.root}/metrics", headers=headers).text
    found = re.search(r"^tieredkv_requests_running (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def test_an_echo_is_scored_token_by_token_whole_and_streamed(client: openai.OpenAI) -> None:
    ids = [list(f"score {text} {TEXT}".encode()) for text in ("one", "two")]
    asked: dict[str, Any] = {"model": MODEL, "prompt": ids, "echo": True, "temperature": 0}
    client.completions.create(**GREEDY, prompt=ids)  # though cached, it is computed again
    whole = client.completions.create(**asked, logprobs=1, max_tokens=1)
    for tokens, choice in zip(ids, whole.choices, strict=True):
        logprobs: Any = choice.logprobs
        assert choice.text == "".join(logprobs.tokens) and len(choice.text) == len(tokens) + 1
        assert logprobs.text_offset == list(range(len(tokens) + 1))
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        own, tops = logprobs.token_logprobs[1:], logprobs.top_logprobs[1:]
        for token, value, top in zip(logprobs.tokens[1:], own, tops, strict=True):
            assert value <= max(top.values()) <= 0 and top[token] == value
    assert whole.usage is not None and details(whole.usage)["cached_tokens"] == 0
    silent = client.completions.create(**asked, logprobs=1, max_tokens=0)
    assert silent.usage is not None and silent.usage.completion_tokens == 0
    for short, long in zip(silent.choices, whole.choices, strict=True):
        assert long.text[:-1] == short.text and short.finish_reason == "length"
        assert short.logprobs is not None and long.logprobs is not None
        assert short.logprobs.token_logprobs == pytest.approx(long.logprobs.token_logprobs[:-1])
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.completions.create(**asked, logprobs=1, max_tokens=3, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.logprobs.token_logprobs if part.logprobs else []
    for i, choice in enumerate(whole.choices):
        scores: Any = choice.logprobs
        assert streamed[i][: len(ids[i]) + 1] == pytest.approx(scores.token_logprobs, abs=1e-4)
        assert len(streamed[i]) == len(ids[i]) + 3


def test_blocks_that_cannot_be_stored_are_told_by_health_and_by_a_stop_that_loses_them(
    faulty_disk: FaultyDisk,
) -> None:
    flags = ("--disk-write", "write_behind")
    with running(faulty_disk.folder, *flags) as server, server.client() as client:

        def disk_after(prompt: str) -> dict[str, str]:
            client.completions.create(**GREEDY, prompt=f"{prompt} {TEXT}")
            time.sleep(0.1)  # the disk is tried again once a second, and requests keep a core busy
            health = server.health()
            assert (health.status_code, health.json()["status"]) == (200, "ok")
            disk: dict[str, str] = health.json()["disk"]
            return disk

        faulty_disk.set_faults(only=".seg", fail_writes=errno.ENOSPC)
        wait_until(lambda: disk_after(f"{time.monotonic()}")["status"] == "failing", "it is ok")
        golden.told(disk_after("another")["cause"])
        faulty_disk.set_faults()
        wait_until(lambda: disk_after(f"{time.monotonic()}") == {"status": "ok"}, "it stays so")

        faulty_disk.set_faults(only=".seg", fail_writes=errno.EIO)
        prompt = f"promised {TEXT}"
        client.completions.create(**GREEDY, prompt=prompt)
        assert server.stop() == 1
        [lost] = server.said("ERROR", "tieredkv.engine.engine_process")
        num_lost = lost.split()[0]
        assert int(num_lost) >= len(prompt) // 16
        golden.told(lost, hide={num_lost: "COUNT"})
        faulty_disk.set_faults()
