"""A tenant cannot find out another tenant's prompts: by counts, by times, or in any tier.

Each test also runs on a server whose tenants share the cache. There it must see the other tenant's
prompts, which proves that it is able to see them.
"""

import contextlib
import math
import random
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.levels import few
from tests.serving import Server, running
from tests.waiting import HANG_S

FULL = 256
CERTAIN = 1e-6
SALTED = {"cache_salt": "of somebody else"}
SMALL = ("--device-size", "2MiB", "--host-size", "16MiB")  # 64 blocks and 512 blocks
BRIEFLY = {"prompt_cache_retention": "in_memory"}


def prompt(*seed: object) -> list[int]:
    """Return random tokens: 16 full blocks and a partial one."""
    generator = random.Random(str(seed))
    return [generator.randrange(256) for _ in range(FULL + 8)]


def ks_probability(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the probability that samples of one distribution differ as much as these two.

    Source: the Kolmogorov-Smirnov test, with the small-sample approximation of Stephens, 1970.
    """
    a, b = sorted(some), sorted(others)
    gap: float = max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in a + b)
    size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    scaled = gap * (size + 0.12 + 0.11 / size)
    if scaled < 0.2:  # the series does not converge here; its limit is 1
        return 1.0
    signs = [1.0, -1.0] * 50
    series = (sign * math.exp(-2 * (k * scaled) ** 2) for k, sign in enumerate(signs, start=1))
    return min(1.0, 2 * sum(series))


class Tenants(contextlib.ExitStack):
    """Two tenants of one server, on connections that stay open."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._http = self.enter_context(httpx.Client(base_url=server.url, timeout=HANG_S))

    def ask(self, key: str, tokens: list[int], **fields: Any) -> tuple[dict[str, int], float]:
        """Ask for one token; return the cached tokens by tier and the seconds that it took."""
        body = {"model": "tiny-random", "prompt": tokens, "max_tokens": 1, **fields}
        start = time.perf_counter()
        answer = self._http.post("/completions", json=body, headers={"x-api-key": key})
        elapsed = time.perf_counter() - start
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        by_tier: dict[str, int] = details["cached_tokens_by_tier"]
        assert sum(by_tier.values()) == details["cached_tokens"]
        assert details["cached_tokens"] + details["cache_write_tokens"] == FULL
        return by_tier, elapsed


def flags(isolate_by: str) -> tuple[str, ...]:
    """Return the flags of a server with two tenants."""
    return (*SMALL, "--api-key", "sk-a", "--api-key", "sk-b", "--isolate-by", isolate_by)


@pytest.fixture(scope="module", params=few(["salt", "none"]))
def isolate_by(request: pytest.FixtureRequest) -> str:
    """Return the value of `--isolate-by`; with `none`, tenants share the cache."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, isolate_by: str) -> Iterator[Server]:
    """Return a server that isolates its tenants as told."""
    with running(tmp_path_factory.mktemp("isolation"), *flags(isolate_by)) as server:
        yield server
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("num_probes", [60, pytest.param(250, marks=pytest.mark.slow)])
def test_neither_counts_nor_times_tell_what_another_tenant_has_asked(
    server: Server, isolate_by: str, num_probes: int
) -> None:
    order = random.Random(5)
    times: dict[bool, list[float]] = {True: [], False: []}
    found: dict[bool, set[int]] = {True: set(), False: set()}
    with Tenants(server) as tenants:
        # On a busy machine more probes may be needed to see a difference that is there.
        most_probes = num_probes * (5 if isolate_by == "none" else 1)
        for i in range(most_probes):
            if i >= num_probes and ks_probability(times[True], times[False]) < CERTAIN:
                break
            tenants.ask("sk-a", prompt(num_probes, i, True), **BRIEFLY)
            for is_known in order.sample((True, False), 2):
                by_tier, elapsed = tenants.ask("sk-b", prompt(num_probes, i, is_known), **BRIEFLY)
                times[is_known].append(elapsed)
                found[is_known].add(sum(by_tier.values()))
    probability = ks_probability(times[True], times[False])
    if isolate_by == "none":
        assert found == {True: {FULL}, False: {0}}
        assert probability < CERTAIN
    else:
        assert found == {True: {0}, False: {0}}
        assert probability > 1e-4


def test_no_tier_and_no_restart_gives_a_tenant_what_another_has_asked(
    server: Server, isolate_by: str
) -> None:
    strangers: list[tuple[str, dict[str, Any]]] = [("sk-b", {}), ("sk-a", SALTED)]
    if isolate_by == "none":
        strangers.pop()

    def check(tier: str) -> None:
        for key, fields in strangers:
            found, _ = tenants.ask(key, prompt(tier), **fields)
            assert sum(found.values()) == (FULL if isolate_by == "none" else 0)
            if isolate_by == "none":
                assert found[tier] > 0
        found, _ = tenants.ask("sk-a", prompt(tier))
        assert sum(found.values()) == FULL
        assert found[tier] > 0 or isolate_by == "none"  # sharing: the stranger promoted it

    with Tenants(server) as tenants:
        tenants.ask("sk-a", prompt("device"))
        check("device")
        tenants.ask("sk-a", prompt("host"))
        for i in range(6):  # more blocks than VRAM holds
            tenants.ask("sk-a", prompt("other", i))
        check("host")
        tenants.ask("sk-a", prompt("disk"))
    assert server.stop() == 0
    if isolate_by == "none":
        return
    with running(server.disk_dir.parent, *flags(isolate_by)) as again, Tenants(again) as tenants:
        check("disk")
        assert again.stop() == 0


def test_the_statistic_tells_different_samples_apart_but_not_equal_ones() -> None:
    draw = random.Random(1).gauss
    calm = [
        ks_probability([draw(0, 1) for _ in range(60)], [draw(0, 1) for _ in range(60)])
        for _ in range(200)
    ]
    assert 0.02 < sum(it < 0.1 for it in calm) / 200 < 0.2
    assert ks_probability([draw(0, 1) for _ in range(250)], [draw(1, 1) for _ in range(250)]) < 1e-6
