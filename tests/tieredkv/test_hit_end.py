"""A hit ends where the needs of every group of layers are met, and what follows it is right.

The model here has one layer that attends to all tokens, and one above it with a window of two
blocks. The keys of a block in the second layer depend on the first layer's output, so that wrong
keys anywhere give wrong keys behind them.
"""

from hypothesis import given
from hypothesis import strategies as st

from tieredkv.cache.hit_end import hit_end, last_end
from tieredkv.cache.row import Row, State
from tieredkv.types import BlockHash

NUM_NEEDED = 2
Keys = tuple[int, ...]


def needs(end: int) -> tuple[range, range]:
    """Return the blocks whose keys a hit needs that ends behind `end` blocks, by layer."""
    return range(end), range(max(0, end - NUM_NEEDED), end)


def find_end(missing: list[list[int]], num_blocks: int) -> int:
    """Return where a hit ends if these blocks are missing, by layer."""
    num_found = min(missing[0], default=num_blocks)
    ends = range(num_blocks + 1)
    return hit_end(num_found, NUM_NEEDED, ends, lambda asked: sorted({*asked} & {*missing[1]}))


class FakeModel:
    """Computes the keys of one block after another, from those that it is given."""

    def compute(self, index: int, token: int, keys: list[dict[int, int]]) -> tuple[int, int]:
        """Return the keys of a block for both layers.

        Args:
            index: of the block.
            token: what it holds.
            keys: those of blocks before it, by layer and index.
        """
        full, tail = keys
        seen = tuple(full[each] for each in range(index))
        windowed = tuple(tail[each] for each in range(max(0, index - 2), index))
        return hash((token, index)), hash((token, seen, windowed))

    def cold(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return the keys of all blocks, computed from the first one on."""
        keys: list[dict[int, int]] = [{}, {}]
        for index, token in enumerate(tokens):
            for layer, made in zip(keys, self.compute(index, token, keys), strict=True):
                layer[index] = made
        return [(keys[0][index], keys[1][index]) for index in range(len(tokens))]


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=6),
    evictions=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=40),
)
def test_requests_find_the_largest_hit_that_both_layers_can_continue_from(
    prompts: list[list[int]], evictions: list[tuple[int, int]]
) -> None:
    model, stored = FakeModel(), [dict[BlockHash, int](), dict[BlockHash, int]()]
    for tokens in prompts:
        hashes = [BlockHash(bytes(tokens[: end + 1])) for end in range(len(tokens))]
        rows, cold = [Row(len(tokens)) for _ in stored], model.cold(tokens)
        missing = [
            [index for index, each in enumerate(hashes) if each not in layer] for layer in stored
        ]
        end = find_end(missing, len(tokens))
        keys: list[dict[int, int]] = [{}, {}]
        for needed, row, layer, made in zip(needs(end), rows, stored, keys, strict=True):
            for index in needed:
                row.find(index, State.FOUND)
                made[index] = layer[hashes[index]]
        for larger in range(end + 1, len(tokens) + 1):
            lacking = ({*a} & {*b} for a, b in zip(needs(larger), missing, strict=True))
            assert any(lacking), "a larger hit"
        for index in range(end, len(tokens)):
            made_now = model.compute(index, tokens[index], keys)
            assert made_now == cold[index]
            for row, layer, made, one in zip(rows, stored, keys, made_now, strict=True):
                row.compute([index])
                made[index] = layer[hashes[index]] = one
        full, tail = rows
        assert [*full.indices(State.FOUND)] == [*range(end)]
        assert [*tail.indices(State.FOUND)] == [*range(max(0, end - 2), end)]
        computed = [[*row.indices(State.COMPUTED)] for row in rows]
        assert computed == [[*range(end, len(tokens))]] * 2
        while evictions and stored[0]:
            which, number = evictions.pop()
            if held := sorted(stored[which]):
                del stored[which][held[number % len(held)]]
            if number % 3 == 0:
                break


def test_a_layer_with_a_window_needs_the_last_blocks_only() -> None:
    assert find_end([[4], [0, 1]], 5) == 4, "the head is behind the window"
    assert find_end([[4], [0, 1, 3]], 5) == 0, "no window is whole"
    assert find_end([[4], [1, 3]], 5) == 1, "a window may be short"


@given(
    st.integers(0, 40), st.integers(1, 5), st.sets(st.integers(0, 39)), st.sets(st.integers(0, 40))
)
def test_the_largest_end_is_found_of_those_that_may_be(
    num_found: int, num_needed: int, lacking: set[int], ends: set[int]
) -> None:
    may_end = (
        end
        for end in ends
        if end <= num_found and lacking.isdisjoint(range(max(0, end - num_needed), end))
    )
    found = hit_end(num_found, num_needed, sorted(ends), lambda some: sorted(lacking & {*some}))
    assert found == max(may_end, default=0)


def test_only_given_ends_count_and_without_any_nothing_is_found() -> None:
    assert last_end([1, 4], 3) == 1
    assert last_end([1, 4], 4) == 4
    assert last_end([1, 4], 0) == last_end([], 3) == 0
