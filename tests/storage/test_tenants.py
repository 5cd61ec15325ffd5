"""Which blocks give way, compared with a model that looks at all blocks each time."""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.storage.blocks import digest, make_record
from tieredkv.storage.extents.tenants import Tenants
from tieredkv.storage.format.record import Extent, Located, Retentions, extent_bytes_for
from tieredkv.storage.index.entries import lru_key
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.transaction import TXN_BLOCKS

PAYLOAD_BYTES = 8192
EXTENT_BYTES = extent_bytes_for(PAYLOAD_BYTES)
NOW = 1_800_000_000.0


class Model:
    """The blocks of a store, and the choice by its definition."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Located] = {}
        self.shares: Mapping[bytes, float] = {}

    def choose(self, needed_bytes: float, asked: Mapping[bytes, int], most: float) -> list[bytes]:
        left = sorted(self.blocks.values(), key=lambda each: lru_key(each.record)[8:])
        has = Counter[bytes]()
        for each in left:
            has[each.record.namespace[:8]] += EXTENT_BYTES
        least = {tenant: self.shares.get(tenant, 0.0) * most for tenant in has}
        returned = {it: n for it, n in asked.items() if has[it] >= least.get(it, 0.0)}
        victims = list[bytes]()
        while needed_bytes > 0 and left and len(victims) < TXN_BLOCKS:

            def rest(each: Located) -> float:
                return has[each.record.namespace[:8]] - EXTENT_BYTES

            def is_evictable(each: Located) -> bool:
                tenant = each.record.namespace[:8]
                return rest(each) + returned.get(tenant, 0) >= least[tenant]

            def is_above(each: Located) -> tuple[float, bytes]:
                tenant = each.record.namespace[:8]
                return -rest(each) / self.shares[tenant], tenant

            chosen = next(filter(is_evictable, left), None)
            if chosen is None:
                chosen = left[0] if asked else min(left, key=is_above)
            victims.append(chosen.record.block_hash)
            has[chosen.record.namespace[:8]] -= EXTENT_BYTES
            left.remove(chosen)
            needed_bytes -= EXTENT_BYTES
        return victims


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_that_of_a_model_that_looks_at_all_blocks(tmp_path: Path, seed: int) -> None:
    dice, model, tenants = random.Random(seed), Model(), Tenants()
    owners = [b"tenant%02d" % number for number in range(7)]
    (tmp_path / "index").mkdir(mode=0o700)
    (tmp_path / "index" / "data.mdb").touch(mode=0o600)
    names, numbers = Retentions(("24h",)), iter(range(10_000))
    index = Index(str(tmp_path / "index"), sync=False, retentions=names)

    def add(count: int) -> None:
        with index.writing() as txn:
            for number in (next(numbers) for _ in range(count)):
                record = make_record(
                    f"{number}",
                    dice.randrange(4),
                    namespace=dice.choice(owners) + digest(f"{dice.randrange(3)}")[:24],
                    last_used=NOW + dice.randrange(1000),
                    size_bytes=PAYLOAD_BYTES,
                )
                new = Located(record, Extent(1, number), PAYLOAD_BYTES, b"c" * 16)
                txn.insert(new)
                model.blocks[record.block_hash] = new
        tenants.note(txn)

    add(40)
    for _ in range(60):
        add(dice.randrange(6))
        if dice.random() < 0.2:
            some = dice.sample(owners, dice.randrange(len(owners) + 1))
            model.shares = {each: dice.choice((0.05, 0.2, 0.5)) for each in some}
            tenants.keep_shares(model.shares)
        if dice.random() < 0.1:
            tenants.forget()
        if model.blocks and dice.random() < 0.5:  # a touch
            old = dice.choice(list(model.blocks.values()))
            used = old.record.last_used + dice.randrange(300)
            changed = old._replace(record=replace(old.record, last_used=used))
            with index.writing() as txn:
                txn.replace(old, changed)
            tenants.note(txn)
            model.blocks[changed.record.block_hash] = changed
        most = dice.choice((20, 40, 60)) * EXTENT_BYTES
        asked = {each: dice.randrange(1, 4) * EXTENT_BYTES for each in dice.sample(owners, 2)}
        asked = dice.choice(({}, asked))
        needed = dice.randrange(5) * EXTENT_BYTES
        with index.writing() as txn:
            chosen = tenants.choose(txn, needed, asked, most)
            assert [it.record.block_hash for it in chosen] == model.choose(needed, asked, most)
            for located in chosen:
                txn.remove(located, "test")
                del model.blocks[located.record.block_hash]
        tenants.note(txn)
    index.close()
