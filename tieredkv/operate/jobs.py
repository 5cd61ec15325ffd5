"""A verb that a server has carried out by a process of its own, and the answer as that writes it.

The process reads one `Job` from its standard input. To its standard output it writes one line of
JSON: null, or `Refused`. After null it writes the JSON document that the command line prints, as it
is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from tieredkv.operate.ask import StoreControl, document
from tieredkv.operate.calls import Call, EvictFilter
from tieredkv.operate.evict import choose
from tieredkv.operate.models import KnownModel, KnownModels
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages.operator import Asked, Figures, Rows, Scan, StoreFigures
from tieredkv.storage.stats import StoreStats


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be carried out.

    Attributes:
        call: the verb.
        path: the store's folder; "" on a server without a disk tier.
        clock_offset_file: see `tieredkv.clock`.
        told: on a server without a disk tier: what its engine has told of its blocks.
    """

    call: Call
    path: str = ""
    clock_offset_file: str | None = None
    told: list[dict[str, Any]] = []

    def document(self) -> Iterator[str]:
        """Yield the parts of the JSON document that is the answer.

        Without a disk tier the engine evicts, and the answer is which blocks are meant.
        """
        call = self.call
        if self.path:
            control = StoreControl(self.path, clock_offset_file=self.clock_offset_file)
            yield from document(call, control.pages(call))
        elif isinstance(call, EvictFilter):
            yield msgspec.json.encode(choose(call, NoDisk(self.told))).decode()
        else:
            yield from document(call, call.carry_out(NoDisk(self.told)))


class NoDisk(Worker):
    """Stands in for a worker on a server without a disk tier.

    Args:
        told: what the engine answers to `Ls`: the time and the model, and then its blocks.
    """

    def __init__(self, told: Sequence[Mapping[str, Any]]) -> None:
        self._first, *self._told = told
        self.let_go = lambda: None

    def parts(self, asked: Asked, kind: type[Any]) -> Iterator[Any]:
        """Yield no row, but the engine's time."""
        now = float(self._first["now"])
        if isinstance(asked, Scan):
            yield Rows(b"", (), now)
        elif isinstance(asked, Figures):
            yield StoreFigures(StoreStats(), {}, None, now, "")

    def models(self) -> KnownModels:
        """Return the engine's model."""
        return KnownModels([msgspec.convert(self._first["model"], KnownModel)])

    def ask_engine(
        self, call: msgspec.Struct, roots: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> Iterator[dict[str, Any]]:
        """Yield what the engine has told of its blocks."""
        yield from map(dict, self._told)
