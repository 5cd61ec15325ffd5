"""What is of use by `Reach`, beside what a walk through all blocks finds."""

import random
from typing import NamedTuple

import pytest

from tieredkv.cache.reach import Reach
from tieredkv.types import BlockHash


class Known(NamedTuple):
    parent_hash: BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "big"))


def of_use(blocks: dict[BlockHash, Known], places: set[BlockHash]) -> set[BlockHash]:
    """Walk from each place to the first block, or to one that is not known."""
    found = set[BlockHash]()
    for block_hash in places:
        while block_hash in blocks:
            found.add(block_hash)
            block_hash = blocks[block_hash].parent_hash
    return found


def test_blocks_before_the_last_place_that_has_left_are_of_no_use_up_to_another_one() -> None:
    blocks = {name(each): Known(name(each - 1)) for each in range(1, 10)}
    reach = Reach(blocks)
    for place in (3, 8):
        reach.add_place(name(place))
    assert reach.take_changed() == {name(each): True for each in range(1, 9)}
    reach.end_place(name(8))
    assert reach.take_changed() == {name(each): False for each in range(4, 9)}
    reach.end_place(name(3))
    assert reach.take_changed() == {name(each): False for each in range(1, 4)}


def test_a_branch_keeps_what_it_shares_with_another() -> None:
    blocks = {name(1): Known(name(0))}
    blocks |= {name(each): Known(name(1)) for each in (2, 3)}
    reach = Reach(blocks)
    for place in (2, 3):
        reach.add_place(name(place))
    reach.take_changed()
    reach.end_place(name(2))
    assert reach.take_changed() == {name(2): False}


@pytest.mark.parametrize("seed", range(20))
def test_any_blocks_and_places_that_come_and_go_are_known(seed: int) -> None:
    numbers, blocks, places = random.Random(seed), dict[BlockHash, Known](), set[BlockHash]()
    reach, seen = Reach(blocks), set[BlockHash]()
    parents = {number: numbers.randrange(number) for number in range(1, 40)}
    for _ in range(400):
        number = numbers.randrange(1, 40)
        block_hash, parent_hash = name(number), name(parents[number])
        match numbers.randrange(4):
            case 0 if block_hash not in blocks:
                blocks[block_hash] = Known(parent_hash)
                reach.add(block_hash)
            case 1 if block_hash in blocks:
                del blocks[block_hash]
                reach.forget(block_hash, parent_hash)
                seen.discard(block_hash)
            case 2:
                places.add(block_hash)
                reach.add_place(block_hash)
            case 3:
                places.discard(block_hash)
                reach.end_place(block_hash)
        reach.check()
        for changed, is_of_use in reach.take_changed().items():
            (seen.add if is_of_use else seen.discard)(changed)
        assert seen & blocks.keys() == of_use(blocks, places)
