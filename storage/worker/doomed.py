"""The namespaces that an operator has deleted, while their blocks are being dropped.

They are gone at once: lookups miss their blocks, and no store of theirs is kept. Any thread may use
this module.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tieredkv.storage.format.record import namespace_in


class Doomed:
    """Which namespaces are being deleted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefixes: tuple[str, ...] = ()  # hex digits, "" for every namespace

    @contextmanager
    def deleting(self, prefix: str) -> Iterator[None]:
        """Have the namespaces whose hex digits begin so count as deleted."""
        with self._lock:
            self._prefixes += (prefix,)
        try:
            yield
        finally:
            with self._lock:
                rest = [*self._prefixes]
                rest.remove(prefix)
                self._prefixes = tuple(rest)

    def covers(self, namespace: bytes) -> bool:
        """Return whether a namespace is being deleted."""
        prefixes = self._prefixes
        return bool(prefixes) and namespace.hex().startswith(prefixes)

    def without(self, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Return sealed records by block without those of such namespaces."""
        if not self._prefixes:
            return found
        return {name: it for name, it in found.items() if not self.covers(namespace_in(it))}
