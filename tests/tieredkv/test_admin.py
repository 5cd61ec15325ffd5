"""Operators' verbs over HTTP, where there is no disk tier."""

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from starlette.responses import StreamingResponse

from tests.fake_store import chain_of, root_of
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.operate.calls import Call, Inspect
from tieredkv.operate.infos import BlockInfo
from tieredkv.server.admin import respond
from tieredkv.server.engine_client import EngineClient
from tieredkv.types import BlockRecord, Tier

CHAIN = chain_of("a", 3)


def described() -> list[dict[str, Any]]:
    """Return what an engine tells of each block of `CHAIN`."""
    parents = [root_of("a"), *CHAIN]
    records = [
        BlockRecord(
            block_hash=block_hash,
            parent_hash=parent,
            root=root_of("a"),
            namespace=b"ns",
            position=position,
            size_bytes=64,
            retention="in_memory",
            computed_at=1.0,
            expires_at=9.0,
            last_used=1.0,
        )
        for position, (block_hash, parent) in enumerate(zip(CHAIN, parents, strict=False))
    ]
    return [msgspec.to_builtins(BlockInfo.of(each, [Tier.DEVICE])) for each in records]


class Engine:
    """Has the chain, but answers an `Inspect` of its first block only with what follows it."""

    def __init__(self) -> None:
        self.calls = list[Inspect]()

    async def operate(self, call: Call) -> list[dict[str, Any]]:
        assert isinstance(call, Inspect)
        self.calls.append(call)
        infos = described()
        if call.following and call.id == CHAIN[0].hex():
            return [{"blocks": infos[2:]}, {}, {"blocks": infos[:2]}, {"blocks": []}]
        return [{}, {"blocks": []}]


def ask(engine: Engine, block_hash: bytes) -> Any:
    body, client = {"id": block_hash.hex()}, cast(EngineClient, engine)

    async def whole() -> bytes:
        answer = await respond("inspect", body, Settings(), client, lambda _: {})
        assert isinstance(answer, StreamingResponse)
        return b"".join([part async for part in answer.body_iterator if isinstance(part, bytes)])

    return json.loads(asyncio.run(whole()))


def test_a_chain_is_put_together_from_the_parts_of_an_answer() -> None:
    engine = Engine()
    assert ask(engine, CHAIN[0]) == {"chain": described()}
    assert [call.following for call in engine.calls] == [False, True]


def test_an_id_that_no_part_of_an_answer_has_is_unknown() -> None:
    with pytest.raises(RequestError) as refused:
        ask(Engine(), b"\xff" * 32)
    assert (refused.value.status, refused.value.code) == (404, "unknown_id")
