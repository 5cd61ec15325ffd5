"""What another engine asked for on behalf of one request, and how much of it makes a head.

The engine asks for chunks in the order of the prompt, except those that its own memory has, and
stops at the first one that is missing. So the chunks of a group that are found without a gap are
what would be loaded. A group with a sliding window needs only its last chunks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Head(NamedTuple):
    """Chunks that would be loaded for a request.

    Attributes:
        begin, end: the places `[begin, end)` of the chunks in their group.
        chunks: the hashes of those that the disk has, with the engine's keys. What is between them
            is in the engine's own memory.
        num_others: chunks of other groups that would be loaded too.
    """

    begin: int
    end: int
    chunks: dict[bytes, bytes]
    num_others: int = 0


@dataclass(slots=True)
class Asked:
    """The chunks that were asked for, by group and place.

    Attributes:
        groups: by group the key and the hash of each chunk, by its place.
    """

    groups: dict[int, dict[int, tuple[bytes, bytes]]] = field(default_factory=dict)
    _places: dict[bytes, int] = field(default_factory=dict)  # by the chunk's hash

    def note(self, group: int, place: int | None, key: bytes, block_hash: bytes) -> None:
        """Note a chunk that is asked for.

        Args:
            group: number of its group.
            place: in its group; if None, as the engine does not tell it, it follows the one asked
                for before.
            key: the engine's name of it.
            block_hash: our name of it.
        """
        chunks = self.groups.setdefault(group, {})
        if block_hash in self._places:
            return
        place = len(chunks) if place is None else place
        chunks[place] = key, block_hash
        self._places[block_hash] = place

    def place(self, block_hash: bytes) -> int | None:
        """Return the place of a chunk in its group, if it was asked for."""
        return self._places.get(block_hash)

    def end(self, group: int) -> int:
        """Return the place behind the last chunk of a group that was asked for."""
        return max(self.groups.get(group, ()), default=-1) + 1

    def head(
        self,
        group: int,
        begin: int,
        has: Callable[[bytes], bool],
        windows: Mapping[int, int | None],
        most: int,
    ) -> Head:
        """Return the head that begins with one chunk of a group, which the disk has.

        Args:
            group: number of the group.
            begin: place of the chunk.
            has: whether the disk has a chunk.
            windows: of how many chunks the sliding window of a group is, if it has one.
            most: chunks that the engine's memory holds.
        """
        found = dict[bytes, bytes]()
        end, chunks = begin, self.groups[group]
        window = windows.get(group)
        for place in sorted(each for each in chunks if each >= begin or window is not None):
            key, block_hash = chunks[place]
            if has(block_hash) and len(found) < most:
                found[block_hash], end = key, max(end, place + 1)
            elif window is None:
                break
        others = 0
        for other in self.groups.keys() - {group}:
            num_found = sum(has(block_hash) for _, block_hash in self.groups[other].values())
            others += _needed(num_found, windows.get(other))
        if window is not None:
            first, num_found = min(chunks), len(found)
            found = dict([*found.items()][num_found - _needed(num_found, window) :])
            return Head(first, end, found, others)
        return Head(begin, end, found, others)


def _needed(num_found: int, window: int | None) -> int:
    """Return how many chunks of a group are loaded; a window may begin within a chunk."""
    return num_found if window is None else min(num_found, window + 1)
