"""When the chunks that another engine holds in its own memory were first offered to us.

A copy that is offered again, by another request or to another tenant, is as old as the first offer
said. What lies on disk keeps its own time; this memory is for what does not, and ends with the
process, as the engine's copies do.
"""


class Ages:
    """Remembers the first offer of each key, the latest `max_keys` of them.

    Args:
        max_keys: more than the engine's memory holds.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._first: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._first)

    def note(self, key: bytes, moment: float) -> float:
        """Note that a chunk is there since `moment` at the latest; return since when it is."""
        first = min(self._first.pop(key, moment), moment)
        self._first[key] = first
        if len(self._first) > self._max_keys:
            del self._first[next(iter(self._first))]
        return first

    def forget(self, key: bytes) -> None:
        """Forget a chunk of which no copy is left, so that the next one is computed anew."""
        self._first.pop(key, None)


class ChainAge:
    """Since when the chunks of one prompt are there, from its begin without a gap."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}  # by place
        self._oldest: list[float] = []  # of the chunks up to each place

    def note(self, place: int, moment: float) -> None:
        """Note since when the chunk at a place is there."""
        if self._known.get(place) == moment:
            return
        self._known[place] = moment
        del self._oldest[place:]
        while (end := len(self._oldest)) in self._known:
            before = self._oldest[-1:]
            self._oldest.append(min([*before, self._known[end]]))

    def oldest(self, end: int) -> float | None:
        """Return since when the oldest of the first `end` chunks is there; None if not known."""
        return self._oldest[end - 1] if 0 < end <= len(self._oldest) else None
