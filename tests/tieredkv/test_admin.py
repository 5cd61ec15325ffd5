"""Operators' verbs over HTTP: without a disk tier, and `df`, which needs no process of its own."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.responses import StreamingResponse

from tests.fake_store import chain_of, root_of
from tests.storage.blocks import info_of, open_store, told_by_engine
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Call, EvictFilter, Ls
from tieredkv.operate.chain_ids import chain_id
from tieredkv.operate.models import KnownModel
from tieredkv.server import admin
from tieredkv.server.admin import respond
from tieredkv.server.engine_client import EngineClient
from tieredkv.types import BlockRecord, Tier

MODEL = KnownModel(name="m", fingerprint="00", dtype="bfloat16", block_size=1, hash_algo="sha256")
NAMESPACE = b"ns" * 16
CHAIN = chain_of("a", 3)
ID = chain_id(CHAIN[0], CHAIN[-1])
RECORDS = [
    BlockRecord(
        block_hash=block_hash,
        parent_hash=parent,
        root=MODEL.root(NAMESPACE),
        namespace=NAMESPACE,
        position=position,
        size_bytes=64,
        retention="in_memory",
        computed_at=1.0,
        expires_at=9.0,
        last_used=1.0,
    )
    for position, (block_hash, parent) in enumerate(
        zip(CHAIN, [root_of("a"), *CHAIN], strict=False)
    )
]


class Engine:
    """Has the chain, at some time, and takes evictions.

    Attributes:
        calls: all that it was asked but for lists.
    """

    def __init__(self, now: float = 2.0) -> None:
        self.calls, self._now = list[Call](), now

    async def operate(self, call: Call) -> list[dict[str, Any]]:
        """Answer as `engine.verbs` does."""
        if isinstance(call, Ls):
            assert call == Ls(), "it lists all blocks"
            told = told_by_engine(*((each, [Tier.DEVICE]) for each in RECORDS))
            return [{"now": self._now, "model": msgspec.to_builtins(MODEL)}, {}, told, {}]
        self.calls.append(call)
        return [{"evicted_blocks": 3, "freed_bytes": 192, "unknown_ids": [], "disk": None}]


def ask(engine: Engine, verb: str, **body: Any) -> Any:
    client = cast(EngineClient, engine)

    async def whole() -> bytes:
        answer = await respond(verb, body, Settings(), client, lambda _: {})
        if not isinstance(answer, StreamingResponse):
            return bytes(answer.body)
        return b"".join([part async for part in answer.body_iterator if isinstance(part, bytes)])

    return json.loads(asyncio.run(whole()))


@pytest.mark.parametrize(
    "body", [{"id": CHAIN[-1].hex()}, {"id": CHAIN[0].hex(), "following": True}]
)
def test_a_chain_is_shown(body: dict[str, Any]) -> None:
    infos = [msgspec.to_builtins(info_of(each, Tier.DEVICE)) for each in RECORDS]
    assert ask(Engine(), "inspect", **body) == {"chain": infos}


@pytest.mark.parametrize(("unknown", "now"), [("ff" * 32, 2.0), (ID, 9.0)])
def test_an_id_of_no_block_or_of_expired_ones_is_unknown(unknown: str, now: float) -> None:
    with pytest.raises(RequestError) as refused:
        ask(Engine(now), "inspect", id=unknown)
    assert (refused.value.status, refused.value.code) == (404, "unknown_id")


def test_chains_are_listed_with_their_model() -> None:
    [chain] = ask(Engine(), "ls", filter="model=m")["chains"]
    assert (chain["id"], chain["blocks"], chain["retention"]) == (ID, 3, "in_memory")
    assert ask(Engine(), "ls", filter="idle>5s") == {"chains": []}


@pytest.mark.parametrize("body", [{"ids": [ID, "ff" * 8]}, {"filter": "blocks=3"}, {"model": "m"}])
def test_an_eviction_tells_the_engine_the_blocks_of_the_chains(body: dict[str, Any]) -> None:
    engine = Engine()
    answer = ask(engine, "evict", **body, dry_run=True)
    unknown_ids = ["ff" * 8] if "ids" in body else []
    assert (answer["evicted_blocks"], answer["unknown_ids"]) == (3, unknown_ids)
    starts = tuple(each[:16] for each in reversed(CHAIN))
    assert engine.calls == [EvictFilter(starts=starts, dry_run=True)]


def test_an_eviction_of_chains_that_are_not_there_is_of_no_block() -> None:
    engine = Engine()
    ask(engine, "evict", model="other")
    assert engine.calls == [EvictFilter(starts=())]


def test_df_is_answered_on_a_thread_while_other_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path / "store", Clock()).close()
    settings, threads = Settings(disk_dir=str(tmp_path / "store")), list[threading.Thread]()
    has_gone_on, answer = threading.Event(), StoreControl.answer

    def slow(control: StoreControl, call: Call) -> dict[str, Any]:
        threads.append(threading.current_thread())
        assert has_gone_on.wait(60.0)
        return answer(control, call)

    def no_process(*_: object) -> None:
        raise AssertionError("`df` needs no process")

    monkeypatch.setattr(StoreControl, "answer", slow)
    monkeypatch.setattr(admin, "VerbProcess", no_process)

    async def both() -> Any:
        asking = asyncio.create_task(
            respond("df", {}, settings, cast(EngineClient, Engine()), lambda _: {})
        )
        while not threads:
            await asyncio.sleep(0.001)
        has_gone_on.set()
        return json.loads(bytes((await asking).body))

    assert asyncio.run(both())["disk"]["blocks"] == 0
    [thread] = threads
    assert thread.daemon and thread is not threading.main_thread()
