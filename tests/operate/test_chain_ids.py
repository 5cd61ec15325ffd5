"""An id that `ls` has printed names its chain for as long as a block of the chain is stored."""

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.storage.blocks import (
    CheckedStore,
    chains,
    choose,
    digest,
    evict,
    make_record,
    open_store,
    put,
    stored_hashes,
    sweep,
)
from tieredkv.operate.calls import EvictFilter
from tieredkv.operate.chain_ids import named_blocks, short_id
from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord


class Conversations:
    """Conversations that grow, branch and are used again, in a store too small for all of them."""

    def __init__(self, store: CheckedStore, clock: FakeClock, seed: int) -> None:
        self.store, self.clock, self.random = store, clock, random.Random(seed)
        self.records: dict[bytes, BlockRecord] = {}
        self.last: list[BlockRecord] = []  # the last block of each conversation

    def say(self, life_s: float) -> None:
        """Add a turn to a conversation, or begin one; the blocks before it are used, too."""
        now, turn = self.clock.now(), len(self.records)
        parent = self.random.choice([None, *self.records.values(), *self.last * len(self.records)])
        self.last = [each for each in self.last if each is not parent]
        before = self.above(parent) if parent else []
        self.store.touch([TouchItem(each.block_hash, now) for each in before])
        stored = stored_hashes(self.store, before)
        added = [each for each in before if each.block_hash not in stored]
        for number in range(self.random.randint(1, 6)):
            above = parent.block_hash if parent else digest("root")
            position = parent.position + 1 if parent else 0
            parent = make_record(
                f"{turn}/{number}",
                position,
                now=now,
                size_bytes=100,
                parent_hash=above,
                expires_at=now + life_s,
            )
            added.append(parent)
        again: dict[str, Any] = {"computed_at": now, "last_used": now, "expires_at": now + life_s}
        added = [replace(each, **again) for each in added]
        self.records |= {each.block_hash: each for each in added}
        self.last.append(added[-1])
        put(self.store, *added)

    def above(self, block: BlockRecord) -> list[BlockRecord]:
        """Return the blocks from the head of a chain to this one."""
        before = self.records.get(block.parent_hash)
        return [*(self.above(before) if before else []), block]

    def stored(self) -> set[bytes]:
        return stored_hashes(self.store, [*self.records.values()])

    def own(self, first: str, last: str) -> list[bytes]:
        """Return the hashes of the blocks from one to another, given as hexadecimal digits."""
        [leaf] = [each for each in self.records.values() if each.block_hash.hex().startswith(last)]
        hashes = [each.block_hash for each in self.above(leaf)]
        [start] = [i for i, each in enumerate(hashes) if each.hex().startswith(first)]
        return hashes[start:]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", ["evicted", "expired"])
def test_an_id_is_good_while_an_own_block_of_its_chain_is_stored(
    tmp_path: Path, what: str, seed: int
) -> None:
    clock = FakeClock()
    budget, life_s = (2 << 20, 1e6) if what == "evicted" else (64 << 20, 60.0)
    with open_store(tmp_path / "s", clock, budget_bytes=budget) as store:
        talk = Conversations(store, clock, seed)

        def go_on(num_turns: int) -> None:
            for _ in range(num_turns):
                talk.say(life_s)
                clock.advance(talk.random.random())
            sweep(store)

        go_on(120)
        printed = [chain.id for chain in chains(store)]
        assert len(printed) > 1
        num_left = 0
        for _ in range(3):
            go_on(25)
            stored = talk.stored()
            for chain_id in printed:
                named = named_blocks(chain_id)
                assert named is not None
                left = [each for each in talk.own(*named) if each in stored]
                chosen = choose(store, [chain_id])
                assert not chosen.unknown_ids or not left, chain_id
                short = choose(store, [short_id(chain_id, 12)])
                assert short[:2] == chosen[:2]
                num_left += bool(left) and len(left) < len(talk.own(*named))
        assert num_left > 0, "nothing went from any chain that was listed"
        for chain_id in printed:
            which = EvictFilter(ids=(chain_id,))
            evict(store, which)
            assert evict(store, which).unknown_ids in ((), (chain_id,))
        stored = talk.stored()
        for chain_id in printed:
            named = named_blocks(chain_id)
            assert named is not None
            leaf = talk.own(*named)[-1]
            assert leaf not in stored, "the last block stays only if another chain goes on from it"
        store.check()
