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
