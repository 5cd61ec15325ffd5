"""What the server keeps of the last hours for the operator's page."""

import json
from typing import Any, cast

import msgspec
import pytest

from tests.fakes import FakeClock
from tieredkv.engine.engine_messages import RequestUsage
from tieredkv.server.diagnosis import Diagnosis, PromptPart, Seen
from tieredkv.server.history import NUM_SAMPLES, SAMPLE_S, History
from tieredkv.types import Tier

BLOCK_BYTES = 1 << 20


class Engine:
    """The figures of an engine."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}

    def report(self, *, promoted: int = 0, demoted: int = 0, read: int | None = None) -> None:
        counters = {"promoted_host_blocks": promoted, "demoted_host_blocks": demoted}
        disk = None if read is None else {"bytes_live": 9, "bytes_read": read, "bytes_written": 0}
        self.stats = {
            "block_bytes": BLOCK_BYTES,
            "device": {"bytes_live": 5},
            "host": {"bytes_live": 7},
            "disk": disk,
            "counters": counters,
            "learnt": {"prefill_tokens_per_s": {"0": 1000.0, "16384": 500.0}},
        }


def make() -> tuple[History, Engine, FakeClock]:
    engine, clock = Engine(), FakeClock()
    return History(cast(Any, engine), clock.now), engine, clock


def usage(prompt_tokens: int, **by_tier: int) -> RequestUsage:
    cached = {tier: by_tier.get(tier, 0) for tier in Tier}
    return RequestUsage(prompt_tokens=prompt_tokens, cached_tokens_by_tier=cached)


def test_a_sample_has_what_happened_in_its_time() -> None:
    history, engine, clock = make()
    engine.report(promoted=3, read=500)
    history.note_first_token("a", usage(100, disk=64, host=16), "disk", 0.25, 0.1)
    history.note_first_token("a", usage(50), "cold", 2.0, 0.1)
    clock.advance(SAMPLE_S)
    history.end_sample()
    engine.report(promoted=5, demoted=1, read=600)
    clock.advance(30)
    first, present = history.document()["samples"]
    assert (first["num_s"], present["num_s"]) == (SAMPLE_S, 30)
    assert (first["prompt_tokens"], first["cached_tokens"]) == (150, {"disk": 64, "host": 16})
    assert first["ttft"]["disk"] == {
        "num": 1,
        "p50_s": pytest.approx(0.25, rel=0.05),
        "p90_s": pytest.approx(0.25, rel=0.05),
    }
    assert (first["moved_bytes"]["host,device"], first["moved_bytes"]["disk,host"]) == (
        3 * BLOCK_BYTES,
        500,
    )
    assert present["moved_bytes"] == {
        "host,device": 2 * BLOCK_BYTES,
        "device,host": BLOCK_BYTES,
        "disk,host": 100,
        "host,disk": 0,
    }
    assert (present["prompt_tokens"], present["ttft"]) == (0, {})
    assert present["held_bytes"] == {"device": 5, "host": 7, "disk": 9}


def test_a_store_worker_that_was_started_again_and_no_disk_are_no_moves() -> None:
    history, engine, _ = make()
    assert history.document()["samples"][0]["moved_bytes"] == {}
    engine.report(read=500)
    history.end_sample()
    engine.report(read=20)
    assert history.document()["samples"][-1]["moved_bytes"]["disk,host"] == 0
    engine.report()
    assert history.document()["samples"][-1]["moved_bytes"].keys() == {"host,device", "device,host"}


def test_saved_time_is_told_by_the_rate_where_the_tokens_were() -> None:
    history, engine, _ = make()
    history.note_first_token("", usage(100, device=100), "device", 0.1, 0.1)
    assert history.document()["since_start"]["saved_s"] == 0.0, "no rate is known yet"
    engine.report()
    history.note_first_token("", usage(2000, device=1000), "device", 0.1, 0.1)
    assert history.document()["since_start"]["saved_s"] == pytest.approx(1.0)
    history.note_first_token("", usage(40_000, host=32_768), "host", 0.1, 0.1)
    assert history.document()["kept"]["saved_s"] == pytest.approx(1.0 + 32_768 / 500)


def test_old_samples_go_and_sums_since_the_start_stay() -> None:
    history, engine, clock = make()
    engine.report()
    for i in range(NUM_SAMPLES + 10):
        for source in ("cold", "device", "host", "disk"):
            history.note_first_token("a", usage(1000, device=16), source, 0.001 * (i + 1), 0.1)
        clock.advance(SAMPLE_S)
        history.end_sample()
    told = history.document()
    assert len(told["samples"]) == NUM_SAMPLES + 1
    assert told["kept"]["prompt_tokens"] == 4000 * NUM_SAMPLES
    assert told["since_start"]["prompt_tokens"] == 4000 * (NUM_SAMPLES + 10)
    assert told["ttft"]["cold"]["num"] == NUM_SAMPLES
    assert told["ttft"]["cold"]["p50_s"] == pytest.approx(0.001 * (NUM_SAMPLES / 2 + 10), rel=0.05)
    assert len(json.dumps(told)) < 400_000


def test_the_last_minutes_can_be_told_alone() -> None:
    history, _, clock = make()
    for i in range(10):
        history.note_first_token("a", usage(100 + i), "cold", 0.1 * (i + 1), 0.1)
        clock.advance(SAMPLE_S)
        history.end_sample()
    told = history.document(last_s=2 * SAMPLE_S)
    assert [each["prompt_tokens"] for each in told["samples"]] == [108, 109, 0]
    assert (told["kept"]["prompt_tokens"], told["ttft"]["cold"]["num"]) == (217, 2)
    assert [each["prompt_tokens"] for each in history.document(last_s=0)["samples"]] == [0]


def test_slow_requests_are_told_with_their_receipts() -> None:
    history, _, clock = make()
    receipt = msgspec.structs.replace(
        usage(100, disk=64), queue_s=0.5, recomputed_tokens=16, miss_reason="never_seen"
    )
    history.note_first_token("a", usage(50), "cold", 0.2, 0.1)
    history.note_first_token("a", receipt, "disk", 2.0, 1.25)
    slowest, other = history.document()["slowest"]
    assert slowest == {
        "at": clock.now(),
        "tenant": "a",
        "ttft_s": 2.0,
        "queue_s": 0.5,
        "prefill_s": 1.25,
        "source": "disk",
        "prompt_tokens": 100,
        "cached_tokens": {"disk": 64},
        "recomputed_tokens": 16,
        "miss_reason": "never_seen",
    }
    assert (other["prompt_tokens"], other["cached_tokens"]) == (50, {})


def test_slow_requests_tell_the_reason_of_their_receipts() -> None:
    history, _, _ = make()
    parts: list[PromptPart] = [("input", "a text", "the prompt")]
    other, seen = (Seen.of(parts, 100, {"namespace": salt}) for salt in "ab")
    diagnosis, missed = Diagnosis(seen, [other]), usage(100)
    missed = msgspec.structs.replace(missed, miss_reason="never_seen")
    history.note_first_token("a", missed, "cold", 2.0, 0.1, diagnosis)
    history.note_first_token("a", missed, "cold", 1.0, 0.1)
    reasons = [it["miss_reason"] for it in history.document()["slowest"]]
    assert reasons == [diagnosis.miss(missed)["reason"], "never_seen"]
    assert reasons[0] == "other_namespace"


def test_tenants_whose_keys_were_removed_are_forgotten() -> None:
    history, _, _ = make()
    for tenant in ("a", "b", "a"):
        history.note_first_token(tenant, usage(10, device=5), "device", 0.1, 0.1)
    assert (history.tenants["a"].num_answers, history.tenants["a"].cached_tokens) == (2, 10)
    history.keep_tenants(lambda tenant: tenant == "b")
    assert history.tenants.keys() == {"b"}
