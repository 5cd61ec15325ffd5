"""A router in front of two servers keeps conversations where their blocks are.

`make test-clients` installs the router first; without it these tests are skipped with the reason.
"""

import contextlib
import itertools
import random
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.programs.install import ENVIRONMENTS, path_of
from tests.serving import Server, running
from tests.waiting import HANG_S, wait_until

WORKER = "x-smg-routed-worker-id"
"""The header in which the router names the server that has answered."""

STICKY = (
    *("--sticky-sessions", "--assignment-mode", "min_group"),
    *("--routing-key-headers", "x-claude-code-session-id", "session-id", "x-session-id"),
)
"""Have the router keep sessions that a header names, each on the server with the fewest of them.

Without them, all conversations that share a system prompt go to one server.
"""

NUM_CLIENTS, NUM_OPEN, NUM_TURNS = 4, 10, 3
"""Clients at once, the conversations that each goes back and forth between, and their turns."""


class Talks(NamedTuple):
    """What clients have seen of their conversations.

    Attributes:
        statuses: how many answers had each status.
        by_server: how many answers each server has given.
        num_later, num_kept: turns behind the first of a conversation, and those of them that went
            to the server of the turn before.
        prompt_tokens, cached_tokens: of all answers.
        ended: conversations that had all of their turns.
    """

    statuses: Counter[int]
    by_server: Counter[str]
    num_later: int
    num_kept: int
    prompt_tokens: int
    cached_tokens: int
    ended: int

    @property
    def affinity(self) -> float:
        return self.num_kept / self.num_later

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def talk(
    url: str, count: int, at_half: Callable[[], None] = lambda: None, *, is_named: bool = True
) -> Talks:
    """Have as many conversations, and call `at_half` in the middle of them.

    Args:
        url: of the router, or of a server.
        count: of the conversations.
        at_half: called by one of the clients.
        is_named: whether the conversations are those of one program, which have one system prompt,
            and tell their name in a header. Else they have nothing in common, and no name.
    """
    lock, numbers, faults = threading.Lock(), itertools.count(1), list[BaseException]()
    statuses, by_server, sums = Counter[int](), Counter[str](), Counter[str]()

    def be_client(first: int) -> None:
        chance = random.Random(first)
        to_begin = iter(range(first, count, NUM_CLIENTS))
        talks = {number: [] for number in itertools.islice(to_begin, NUM_OPEN)}  # type: ignore[var-annotated]
        last = dict[int, str]()
        with httpx.Client(base_url=url, timeout=HANG_S) as http:
            while talks:
                number = chance.choice(list(talks))
                system = "You help. " * 10 if is_named else f"{number} helps."
                messages = talks[number] or [{"role": "system", "content": system}]
                text = f"{number}: " + " ".join(f"{chance.random():.9f}" for _ in range(8))
                messages = [*messages, {"role": "user", "content": text}]
                with lock:
                    if next(numbers) == count * NUM_TURNS // 2:
                        at_half()
                body = {"model": "tiny-random", "messages": messages, "max_tokens": 8}
                headers = {"x-session-id": f"talk-{number}"} if is_named else {}
                answer = http.post("/v1/chat/completions", json=body, headers=headers)
                told, server = answer.json(), answer.headers.get(WORKER, "")
                with lock:
                    statuses[answer.status_code] += 1
                    by_server[server] += 1
                    sums["later"] += number in last
                    sums["kept"] += last.get(number) == server
                    usage = told["usage"]
                    sums["prompt"] += usage["prompt_tokens"]
                    sums["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
                last[number] = server
                talks[number] = [*messages, told["choices"][0]["message"]]
                if len(talks[number]) > 2 * NUM_TURNS:
                    del talks[number]
                    sums["ended"] += 1
                    talks |= {following: [] for following in itertools.islice(to_begin, 1)}

    def run(first: int) -> None:
        try:
            be_client(first)
        except BaseException as error:  # raised again below, by the thread that waits
            faults.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    names = ("later", "kept", "prompt", "cached", "ended")
    return Talks(statuses, by_server, *(sums[name] for name in names))


def sizes(device_mib: int, host_mib: int) -> Sequence[str]:
    return "--device-size", f"{device_mib}MiB", "--host-size", f"{host_mib}MiB"


@contextlib.contextmanager
def smg(folder: Path, servers: Sequence[Server]) -> Iterator[str]:
    """Run the router in front of servers while the context lasts; yield its address."""
    program = path_of(ENVIRONMENTS / "routers" / "bin" / "smg", "routers")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics_port = one.getsockname()[1], other.getsockname()[1]
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--prometheus-port",
        str(metrics_port),
        "--worker-urls",
        *(it.root for it in servers),
    ]
    command += ["--policy", "cache_aware", *STICKY]
    log, url = folder / "smg.log", f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:

        def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                workers = httpx.get(f"{url}/workers").json()["workers"]
                return len(workers) == len(servers) and all(it["is_healthy"] for it in workers)
            return False

        wait_until(is_ready, "no router", process=process, log=log.read_text)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Server]]:
    """Yield two servers."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name in "ab":
            (tmp_path / name).mkdir()
            folder, how = tmp_path / name, sizes(8, 24)
            servers.append(stack.enter_context(running(folder, *how, has_disk=False)))
        yield servers


@pytest.mark.parametrize("is_named", [True, False])
def test_two_servers_find_what_one_with_twice_the_memory_finds(
    is_named: bool, pair: list[Server], tmp_path: Path
) -> None:
    with smg(tmp_path, pair) as url:
        routed = talk(url, 200, is_named=is_named)
    assert routed.statuses.keys() == {200} and routed.ended == 200
    assert routed.affinity >= 0.95
    assert min(routed.by_server[server.root] for server in pair) >= 150
    (tmp_path / "one").mkdir()
    with running(tmp_path / "one", *sizes(16, 48), has_disk=False) as one:
        alone = talk(one.root, 200, is_named=is_named)
    assert abs(routed.hit_rate - alone.hit_rate) <= 0.03, (routed, alone)


def test_no_conversation_is_lost_with_a_server(pair: list[Server], tmp_path: Path) -> None:
    with smg(tmp_path, pair) as url:
        seen = talk(url, 40, at_half=pair[0].kill)
    assert seen.statuses.keys() == {200} and seen.ended == 40
    assert seen.by_server[pair[0].root] and seen.by_server[pair[1].root] > 60
