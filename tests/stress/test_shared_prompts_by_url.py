"""The client that shares a short prompt among requests counts what a server finds of it."""

import contextlib
from pathlib import Path

from tests.serving import running
from tests.stress.shared_prompts_by_url import figures, measure
from tests.stress.ttft_by_url import Server


def test_a_server_finds_the_shared_tokens_from_the_second_request_on(tmp_path: Path) -> None:
    with running(tmp_path) as served, contextlib.closing(Server(served.root, 250)) as server:
        groups = [measure(server, 128, 20, 3) for _ in range(2)]
    found = figures(groups, 128)
    assert found["found"] == found["found_second"] == 1.0
    assert all(group[0]["cached_tokens"] == 0 for group in groups)


def test_only_the_third_requests_and_later_ones_count() -> None:
    rows = [{"ttft_ms": 9.0, "cached_tokens": cached} for cached in (0, 0, 64, 200)]
    assert figures([rows], 140)["found"] == (0.5 + 1) / 2
    assert figures([rows], 140)["found_second"] == 0.0
