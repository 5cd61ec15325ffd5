"""A search finds the blocks that only the named chains use, a few at a time."""

import hashlib
from collections.abc import Collection, Sequence

import pytest

from tests.fake_store import chain_of, root_of
from tieredkv.cache import chain_search
from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.cache.chain_search import ChainSearch, named
from tieredkv.cache.pieces import whole
from tieredkv.operate.chain_ids import chain_id, short_id
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicies
from tieredkv.types import BlockHash


def make_catalog() -> Catalog:
    return Catalog(RetentionPolicies([IN_MEMORY, TWENTY_FOUR_HOURS]))


def make_entry(number: int) -> Entry:
    return Entry(
        block_hash=BlockHash(b"%032d" % number),
        parent_hash=BlockHash(b"p" * 32),
        root=BlockHash(b"r" * 32),
        namespace=b"ns",
        position=0,
        computed_at=1.0,
        last_used=1.0,
        claims=frozenset({"in_memory"}),
    )


def add(catalog: Catalog, hashes: Sequence[BlockHash], parent: BlockHash, position: int) -> None:
    """Add a stretch of a chain behind a block."""
    for at, block_hash in enumerate(hashes, position):
        entry = make_entry(0)
        entry.block_hash, entry.parent_hash, entry.position = block_hash, parent, at
        catalog.add(entry)
        parent = block_hash


def search_for(
    catalog: Catalog,
    ids: Sequence[str],
    following: Collection[BlockHash] = (),
    before: Collection[BlockHash] = (),
) -> ChainSearch:
    search = ChainSearch(catalog, ids, following, before)
    whole(search.find())
    return search


def chains(
    catalog: Catalog,
    ids: Sequence[str],
    following: Collection[BlockHash] = (),
    before: Collection[BlockHash] = (),
) -> set[BlockHash]:
    in_ram = {entry.block_hash for entry in catalog.entries()}
    return in_ram.intersection(search_for(catalog, ids, following, before))


def unknown_ids(catalog: Catalog, ids: Sequence[str]) -> list[str]:
    return search_for(catalog, ids).unknown_ids


def test_a_block_names_the_chains_through_it_less_what_others_share() -> None:
    catalog = make_catalog()
    parents = {1: 0, 2: 1, 3: 2, 4: 2, 5: 4}  # two chains, to 3 and to 5, share 0-1-2
    for number in range(6):
        entry = make_entry(number)
        entry.position = number
        if number in parents:
            entry.parent_hash = BlockHash(b"%032d" % parents[number])
        catalog.add(entry)

    def chain(number: int) -> set[int]:
        name = (b"%032d" % number).hex()
        assert unknown_ids(catalog, [name, "ff" * 4]) == ["ff" * 4]
        return {int(block_hash) for block_hash in chains(catalog, [name])}

    assert chain(3) == {3}
    assert chain(4) == {4, 5}
    assert chain(5) == {4, 5}
    assert chain(1) == {0, 1, 2, 3, 4, 5}
    assert chains(catalog, []) == set()
    unknown, head = ["ff" * 4], [BlockHash(b"%032d" % number) for number in (0, 1, 2)]
    assert chains(catalog, unknown, before=head) == set(), "shared by two chains"
    assert chains(catalog, unknown, following=head[2:]) == {
        BlockHash(b"%032d" % number) for number in range(6)
    }
    assert chains(catalog, unknown, following=[BlockHash(b"%032d" % 4)]) == {
        BlockHash(b"%032d" % number) for number in (4, 5)
    }
    for number in (3, 4, 5):
        catalog.forget(BlockHash(b"%032d" % number), "evicted_host")
    assert chains(catalog, unknown, before=head) == set(head)


def test_an_id_names_a_chain_by_its_last_block_or_by_its_first_where_that_is_gone() -> None:
    catalog = make_catalog()
    hashes = [BlockHash(hashlib.sha256(b"%d" % number).digest()) for number in range(6)]
    for number, parent in ((1, 0), (2, 1), (3, 2), (4, 1), (5, 4)):  # block 0 is on disk only
        entry = make_entry(number)
        entry.block_hash, entry.parent_hash, entry.position = hashes[number], hashes[parent], number
        catalog.add(entry)
    chain = chain_id(hashes[1], hashes[3])
    assert chains(catalog, [chain]) == {hashes[2], hashes[3]}, (
        "another one has come from block 1 on"
    )
    assert chains(catalog, [short_id(chain, 8)]) == {hashes[2], hashes[3]}
    assert chains(catalog, [chain], following=[hashes[3]]) == {hashes[2], hashes[3]}
    assert chains(catalog, [short_id(chain, 7)]) == set() == chains(catalog, ["x" * 8, "-", ""])
    catalog.forget(hashes[3], "evicted_host")
    assert chains(catalog, [chain], following=[hashes[3]]) == set(), (
        "the disk has told what to drop"
    )
    assert chains(catalog, [chain]) == set(hashes[1:3]) | set(hashes[4:])
    for number in (1, 4):
        catalog.forget(hashes[number], "expired")
    assert unknown_ids(catalog, [chain]) == [chain]
    assert chains(catalog, [chain], following=[hashes[1]]) == {hashes[2]}


def test_unknown_ids_are_told_in_the_order_of_the_ids() -> None:
    catalog, blocks = make_catalog(), chain_of("a", 2)
    add(catalog, blocks, root_of("a"), 0)
    ids = ["ff" * 4, blocks[0].hex(), "ee" * 4, "x", "ff" * 4]
    assert unknown_ids(catalog, ids) == ["ff" * 4, "ee" * 4, "x", "ff" * 4]
    assert chains(catalog, [blocks[1].hex()[:8]] * 2) == set(blocks), "named twice"


def test_a_search_looks_at_a_bounded_number_of_blocks_between_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain_search, "SCANNED_BLOCKS", 4)
    catalog, chain = make_catalog(), chain_of("a", 40)
    add(catalog, chain, root_of("a"), 0)
    search = ChainSearch(catalog, [chain[20].hex()])
    num_pieces = sum(1 for _ in search.find())
    assert set(search) == set(chain)
    assert num_pieces >= 3 * 40 / 4, "the blocks are named, followed down, and followed up"
    assert sum(1 for _ in named(catalog, chain[7].hex())) == 40 / 4


def test_the_more_lengths_ids_have_the_fewer_blocks_are_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain_search, "SCANNED_BLOCKS", 8)
    catalog, chain = make_catalog(), chain_of("a", 40)
    add(catalog, chain, root_of("a"), 0)
    ids = [chain[39].hex()[:length] for length in range(8, 16)]
    assert sum(1 for _ in ChainSearch(catalog, ids).find()) >= 40 + 2 * 40 / 8
    assert chains(catalog, ids) == set(chain)


def test_a_block_that_comes_behind_a_named_one_during_a_search_belongs_to_the_chain() -> None:
    catalog, chain = make_catalog(), chain_of("a", 6)
    add(catalog, chain[:5], root_of("a"), 0)
    search = search_for(catalog, [chain[4].hex()])
    add(catalog, chain[5:], chain[4], 5)
    assert all(each in search for each in chain)


@pytest.mark.parametrize("is_done", [False, True])
def test_blocks_that_another_chain_has_come_to_share_during_a_search_stay(is_done: bool) -> None:
    catalog, chain = make_catalog(), chain_of("a", 6)
    add(catalog, chain, root_of("a"), 0)
    search = ChainSearch(catalog, [chain[4].hex()])
    finding = search.find()
    next(finding)
    if is_done:
        whole(finding)
    add(catalog, chain_of("b", 1), chain[2], 3)
    whole(finding)
    assert [each in search for each in chain] == [False] * 3 + [True] * 3
    assert chain_of("b", 1)[0] not in search


def test_a_block_that_leaves_and_comes_again_during_a_search_still_belongs_to_it() -> None:
    catalog, chain = make_catalog(), chain_of("a", 4)
    add(catalog, chain, root_of("a"), 0)
    search = search_for(catalog, [chain[3].hex()])
    for block_hash in chain:
        catalog.forget(block_hash, "evicted_host")
    add(catalog, chain[:2], root_of("a"), 0)
    assert all(each in search for each in chain[:2])
