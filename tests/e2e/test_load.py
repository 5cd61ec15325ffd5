"""Many clients at once: some leave, some do not read, some flood, and a SIGTERM under load.

The tests check counts and never times, because the machine may be slow.
"""

import asyncio
import json
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import http
from tests.serving import Server, running
from tests.waiting import HANG_S, wait_until

MODEL = "tiny-random"
LIMITS = httpx.Limits(max_connections=None)
KEYS = """
[quiet]
key = "sk-quiet"
[flood]
key = "sk-flood"
"""
PATHS = ("completions", "chat/completions", "responses", "messages")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with two tenants and room for few requests."""
    folder = tmp_path_factory.mktemp("load")
    keys = folder / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS)
    flags = ("--api-keys-file", str(keys), "--max-num-seqs", "16", "--max-num-queued-reqs", "64")
    with running(folder, *flags, "--default-retention", "in_memory") as server:
        yield server


def body_of(path: str, text: str, num_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body that asks an endpoint for a streamed answer of `num_tokens` tokens."""
    messages = [{"role": "user", "content": text}]
    own: dict[str, Any] = {
        "completions": {"prompt": text, "max_tokens": num_tokens, "ignore_eos": True},
        "chat/completions": {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True},
        "responses": {"input": text, "max_output_tokens": num_tokens, "ignore_eos": True},
        "messages": {"messages": messages, "max_tokens": num_tokens},
    }[path]
    return {"model": MODEL, "stream": True, **own, **more}


async def read_events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream; `[DONE]` must end it where the API says so."""
    async with http.stream("POST", path, json=body) as stream:
        assert stream.status_code == 200, await stream.aread()
        lines = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
    if "completions" in path:
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def counters(server: Server) -> tuple[int, int, int]:
    """Return the numbers of running requests, waiting requests and used blocks of VRAM."""
    told = server.df()
    running, waiting = (told["counters"][f"requests_{it}"] for it in ("running", "waiting"))
    return running, waiting, told["device"]["blocks_used"]


def check_all_is_free(server: Server) -> None:
    """Wait until no request runs, waits or holds a block."""
    wait_until(lambda: counters(server) == (0, 0, 0), "something is still held")


def test_no_token_is_lost_in_64_streams_at_once(server: Server) -> None:
    async def ask_all() -> list[list[Any]]:
        headers = {"x-api-key": "sk-quiet"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, limits=LIMITS, timeout=HANG_S
        ) as http:
            asked = []
            for i in range(64):
                path = PATHS[i % 4]
                more = {"stream_options": {"include_usage": True}} if "completions" in path else {}
                asked.append(read_events(http, path, body_of(path, f"stream {i}", 24, **more)))
            return await asyncio.gather(*asked)

    for i, events in enumerate(asyncio.run(ask_all())):
        match PATHS[i % 4]:
            case "completions" | "chat/completions":
                assert events[-1]["usage"]["completion_tokens"] == 24
                assert events[-2]["choices"][0]["finish_reason"] == "length"
                # A chat starts with an event for the role, and a token may add no text.
                assert 20 < len(events) <= 25 + 2 * (i % 4)
            case "responses":
                assert events[-1]["type"] == "response.incomplete"
                assert events[-1]["response"]["usage"]["output_tokens"] == 24
                assert [it["sequence_number"] for it in events] == list(range(len(events)))
            case "messages":  # it cannot ignore the end token, so it may be shorter
                kinds = Counter(it["type"] for it in events)
                num_output = events[-2]["usage"]["output_tokens"]
                assert events[-1]["type"] == "message_stop"
                assert num_output == kinds["content_block_delta"] > 0
    check_all_is_free(server)


def test_clients_that_leave_free_their_blocks_and_the_others_are_answered(server: Server) -> None:
    async def ask(http: httpx.AsyncClient, i: int) -> int:
        path, is_leaving = PATHS[i // 2 % 2], i % 2 == 0
        if not is_leaving:
            return len(await read_events(http, path, body_of(path, f"stay {i}", 30)))
        async with http.stream("POST", path, json=body_of(path, f"go {i}", 3500)) as stream:
            lines = stream.aiter_lines()
            for _ in range(6):
                await anext(lines)
        return 0

    async def ask_all() -> list[int]:
        headers = {"x-api-key": "sk-quiet"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, limits=LIMITS, timeout=HANG_S
        ) as http:
            return await asyncio.gather(*(ask(http, i) for i in range(24)))

    assert all(num_events >= 30 for num_events in asyncio.run(ask_all())[1::2])
    check_all_is_free(server)


def test_a_client_that_does_not_read_delays_no_other_request(server: Server) -> None:
    port = int(server.root.rpartition(":")[2])
    socks = []
    for i in range(3):
        content = json.dumps(body_of("completions", f"unread {i}", 300, logprobs=20)).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        sock.sendall(f"{head}x-api-key: sk-quiet\r\nConnection: close\r\n\r\n".encode() + content)
        assert sock.recv(64, socket.MSG_PEEK).startswith(b"HTTP/1.1 200")
        socks.append(sock)
    headers = {"x-api-key": "sk-quiet"}
    body = body_of("completions", "read", 20, stream=False)
    answer = http.post(f"{server.url}/completions", json=body, headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 20
    check_all_is_free(server)  # the engine has ended though no token was read
    for sock in socks:
        with sock, sock.makefile("rb") as lines:
            found = [line for line in lines if line.startswith(b"data: {")]
        assert len(found) == 300


def test_a_flood_costs_a_quiet_tenant_no_answer_and_no_cached_token(server: Server) -> None:
    statuses: Counter[int] = Counter()
    is_over = threading.Event()

    def flood(number: int) -> None:
        headers = {"x-api-key": "sk-flood"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=HANG_S) as http:
            for i in range(10_000):
                if is_over.is_set():
                    return
                text = f"flood {number} {i} " * 15
                body = body_of("completions", text, 8, stream=False)
                answer = http.post("completions", json=body)
                statuses[answer.status_code] += 1
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    is_over.wait(0.2)

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(100)]
    headers = {"x-api-key": "sk-quiet"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=HANG_S) as http:
        body = body_of("completions", "quiet " * 130, 4, stream=False)
        assert http.post("completions", json=body).status_code == 200
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: statuses[429] >= 50 and statuses[200] >= 20, "this is no flood")
            told = [http.post("completions", json=body) for _ in range(8)]
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert [answer.status_code for answer in told] == [200] * 8
    by_tier = [it.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] for it in told]
    assert by_tier == [{"device": 780 // 16 * 16, "host": 0, "disk": 0}] * 8
    assert set(statuses) == {200, 429}
    check_all_is_free(server)


def test_sigterm_under_load_ends_the_server_in_an_orderly_way(server: Server) -> None:
    ends: Counter[str] = Counter()
    begun: list[int] = []

    async def ask(http: httpx.AsyncClient, i: int) -> None:
        path = PATHS[i % 4]
        keep = {} if path == "messages" else {"prompt_cache_retention": "24h"}
        try:
            body = body_of(path, f"{i} until the end " * 9, 3000, **keep)
            async with http.stream("POST", path, json=body) as stream:
                parts = stream.aiter_bytes()
                text = await anext(parts)
                begun.append(i)
                if i % 8 == 1:
                    return
                text += b"".join([part async for part in parts])
                ends["told" if b"shutting_down" in text else "whole"] += 1
        except httpx.TransportError:
            ends["closed"] += 1

    async def ask_all() -> None:
        headers = {"x-api-key": "sk-quiet"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, limits=LIMITS, timeout=HANG_S
        ) as http:
            tasks = [asyncio.create_task(ask(http, i)) for i in range(32)]
            async with asyncio.timeout(HANG_S):
                while len(begun) < 8:
                    await asyncio.sleep(0.05)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)

    asyncio.run(ask_all())  # this test must be the last one: it ends the server
    assert server.process.wait(HANG_S) == 0
    assert "Traceback" not in server.log, server.log
    assert ends["closed"] == 0 and ends["told"] >= 8, ends
    told = server.df()
    assert told["writer_pid"] is None, "a process outlives its server"
    assert told["disk"]["blocks"] > 0, "what was promised is not written"
