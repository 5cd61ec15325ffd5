"""The slowest requests that the server keeps."""

import random

from tieredkv.server.slow_requests import KEPT_MINUTES, NUM_SLOWEST, SlowRequest, SlowRequests

START = 6000.0


def slow(at: float, ttft_s: float) -> SlowRequest:
    return SlowRequest(
        at=at,
        tenant="a",
        ttft_s=ttft_s,
        queue_s=0.0,
        prefill_s=0.0,
        source="cold",
        prompt_tokens=1,
        cached_tokens={},
        recomputed_tokens=0,
        miss_reason=None,
    )


def test_they_are_the_slowest_of_the_last_ten_minutes() -> None:
    requests, chance = SlowRequests(), random.Random(1)
    asked = [slow(START + i, chance.uniform(0, 9)) for i in range(1800)]
    for request in asked:
        if requests.would_keep(request.at, request.ttft_s):
            requests.add(request)
        present = request.at // 60
        recent = [it for it in asked if 0 <= present - it.at // 60 < KEPT_MINUTES]
        recent = [it for it in recent if it.at <= request.at]
        expected = sorted(recent, key=lambda it: -it.ttft_s)[:NUM_SLOWEST]
        assert requests.slowest(request.at) == expected
    assert len(expected) == NUM_SLOWEST


def test_they_are_forgotten_without_further_requests() -> None:
    requests = SlowRequests()
    requests.add(slow(START, 1.0))
    assert requests.slowest(START + 60 * KEPT_MINUTES - 1) == [slow(START, 1.0)]
    assert requests.slowest(START + 60 * KEPT_MINUTES) == []


def test_a_clock_that_was_set_back_leaves_no_request_of_the_future() -> None:
    requests = SlowRequests()
    requests.add(slow(START, 9.0))
    requests.add(slow(START - 3600, 1.0))
    assert [it.ttft_s for it in requests.slowest(START - 3600)] == [1.0]
