"""`ls`: the chains of all tiers."""

from typing import ClassVar

from tieredkv.errors import ConfigError
from tieredkv.operate.filters import parse_filter, parse_order
from tieredkv.operate.verb import Asking, Verb
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages.operator import NO_ANSWER


class Ls(Verb, frozen=True, kw_only=True, tag="ls"):
    """The chains of all tiers, those whose last block was used last first.

    An engine that is asked this tells all blocks that it holds; see `operate.ram`.

    Attributes:
        filter: see `filters.parse_filter`; "" for all chains.
        sort: see `filters.parse_order`; "" for the last used first.
        limit: how many chains to list at most; None for all.
    """

    listed_as: ClassVar[str] = "chains"

    filter: str = ""
    sort: str = ""
    limit: int | None = None

    def check(self) -> None:
        """Refuse an unknown field, and a limit below one."""
        parse_filter(self.filter)
        parse_order(self.sort)
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"`limit` = {self.limit} must be at least 1")

    def carry_out(self, worker: Worker) -> Asking:
        """Yield the chains by pages; tell whether some of the engine's may lack.

        The worker is let go before the first page, since nobody knows when the next one is asked
        for.
        """
        from tieredkv.operate.columns import ChainColumns  # these load NumPy
        from tieredkv.operate.ram import RamBlocks, chains_of

        in_ram = RamBlocks(worker.ask_engine(Ls()))
        chains, now = chains_of(worker, in_ram)
        columns = ChainColumns(chains, worker.models())
        worker.let_go()
        conditions, order = parse_filter(self.filter), parse_order(self.sort)
        yield from columns.listed(conditions, order, self.limit, now)
        return {} if in_ram.is_told else {**NO_ANSWER}
