"""Routers in front of two servers keep conversations where their blocks are.

`make test-clients` installs the routers first; without them these tests are skipped with the
reason.
"""

import contextlib
import itertools
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.programs.install import ENVIRONMENTS, path_of
from tests.e2e.programs.recorder import Recorder
from tests.serving import Server, free_port, running
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.clients

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
                    num_tokens = told["usage"]["prompt_tokens"]
                    num_cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                    sums["prompt"] += num_tokens
                    sums["cached"] += num_cached
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
def router(folder: Path, name: str, roots: Sequence[str], *flags: str) -> Iterator[str]:
    """Run a router in front of servers while the context lasts; yield its address.

    Args:
        folder: for the log.
        name: of the program.
        roots: addresses of the servers, in any order.
        flags: beside those that all routers know.
    """
    program = path_of(ENVIRONMENTS / "routers" / "bin" / name, "routers")
    port, log = free_port(), folder / f"{name}.log"
    command = [program, *(["launch"] if name == "smg" else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += [*flags, "--worker-urls", *roots]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:

        def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                if name != "smg":
                    return httpx.get(f"{url}/health").status_code == 200
                workers = httpx.get(f"{url}/workers").json()["workers"]
                return len(workers) == len(roots) and all(it["is_healthy"] for it in workers)
            return False

        wait_until(is_ready, "no router", process=process, log=log.read_text)
        yield url
    finally:
        process.kill()
        process.wait()


class Announced(NamedTuple):
    """A server that publishes KV cache events.

    Attributes:
        recorder: stands in front of the server, and adds its name to answers.
        events, replay: the addresses of the events.
    """

    server: Server
    recorder: Recorder
    events: str
    replay: str

    @property
    def root(self) -> str:
        """The address at which routers reach the server, which is also its name."""
        return self.recorder.root

    def end(self) -> None:
        """Kill the server, so that nothing answers at its address."""
        self.server.kill()
        self.recorder.stop()


Start = Callable[[Path, Sequence[Announced]], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def announced(folder: Path, *flags: str, has_disk: bool = True) -> Iterator[Announced]:
    """Run a server that publishes events while the context lasts."""
    folder.mkdir()
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    told = ["--kv-events", "on", "--kv-events-endpoint", events]
    told += ["--kv-events-replay-endpoint", replay]
    with (
        running(folder, *flags, *told, has_disk=has_disk) as server,
        Recorder(server.root) as recorder,
    ):
        recorder.added[WORKER] = recorder.root
        yield Announced(server, recorder, events, replay)


def smg(folder: Path, servers: Sequence[Announced]) -> contextlib.AbstractContextManager[str]:
    """Run smg, which follows its own history."""
    flags = "--policy", "cache_aware", *STICKY
    return router(folder, "smg", [each.root for each in servers], *flags)


def vllm_router(
    folder: Path, servers: Sequence[Announced]
) -> contextlib.AbstractContextManager[str]:
    """Run vllm-router, which follows the servers' events."""
    flags = ["--policy", "kv_aware", "--kv-event-block-size", "16"]
    flags += ["--kv-aware-session-affinity-ttl-secs", "3600", "--kv-event-model", "tiny-random"]
    for each in servers:
        flags += ["--kv-event-source", f"{each.root}={each.events}"]
        flags += ["--kv-event-replay-source", f"{each.root}={each.replay}"]
    return router(folder, "vllm-router", [each.root for each in servers], *flags)


def ask(url: str, system: str, text: str = "Go on.") -> dict[str, int]:
    """Ask a question behind a system prompt; return the tokens found in each tier."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"model": "tiny-random", "messages": messages, "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S).json()
    found: dict[str, int] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return found


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Announced]]:
    """Yield two servers."""
    with contextlib.ExitStack() as stack:
        how = sizes(8, 24)
        yield [
            stack.enter_context(announced(tmp_path / name, *how, has_disk=False)) for name in "ab"
        ]


# vllm-router weighs loads against what it would find, so that conversations without a name move.
@pytest.mark.parametrize(("start", "is_named"), [(smg, True), (smg, False), (vllm_router, True)])
def test_two_servers_find_what_one_with_twice_the_memory_finds(
    start: Start, is_named: bool, pair: list[Announced], tmp_path: Path
) -> None:
    with start(tmp_path, pair) as url:
        routed = talk(url, 200, is_named=is_named)
    assert routed.statuses.keys() == {200} and routed.ended == 200
    assert routed.affinity >= 0.95
    assert min(routed.by_server[each.root] for each in pair) >= 150
    (tmp_path / "one").mkdir()
    with running(tmp_path / "one", *sizes(16, 48), has_disk=False) as one:
        alone = talk(one.root, 200, is_named=is_named)
    assert abs(routed.hit_rate - alone.hit_rate) <= 0.03, (routed, alone)


@pytest.mark.parametrize("start", [smg, vllm_router])
def test_no_conversation_is_lost_with_a_server(
    start: Start, pair: list[Announced], tmp_path: Path
) -> None:
    with start(tmp_path, pair) as url:
        seen = talk(url, 40, at_half=pair[0].end)
    assert seen.statuses.keys() == {200} and seen.ended == 40, seen
    assert seen.by_server[pair[0].root] and seen.by_server[pair[1].root] > 60


def test_a_prefix_goes_to_the_server_that_has_it_in_the_faster_tier(tmp_path: Path) -> None:
    chance = random.Random(0)

    def some() -> str:
        return " ".join(f"{chance.random():.9f}" for _ in range(60))

    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(announced(tmp_path / name, *sizes(8, 8))) for name in "ab"
        )
        url = stack.enter_context(vllm_router(tmp_path, [one, other]))
        pairs = {some(): (one.server, other.server), some(): (other.server, one.server)}
        for system, (_, slower) in pairs.items():
            ask(slower.root, system)
        for _ in range(30):  # so that these have left VRAM and host memory
            for each in (one, other):
                ask(each.server.root, some())
        for system, (faster, _) in pairs.items():
            ask(faster.root, system)
        time.sleep(1.0)  # the router has no sign of having taken in what it was told
        for system in pairs:
            assert ask(url, system, "Which way?")["device"] > 600
        for system, (_, slower) in pairs.items():
            found = ask(slower.root, system, "Which way?")
            assert found["disk"] > 600 and not found["device"], found
