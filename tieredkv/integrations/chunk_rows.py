"""What vLLM's chunks are: their groups, their places in a prompt and their bytes in a row."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.integrations.row_parts import Parts, Span, gaps_in
from tieredkv.integrations.vllm_spec import group_spans, group_windows

logger = logging.getLogger(__name__)


def group_of(key: bytes) -> int:
    """Return the number of the group that vLLM's key of a chunk names."""
    return int.from_bytes(key[-4:], "big")


class ChunkRows:
    """The chunks of one model.

    Attributes:
        spans: tokens of a chunk of each group.
        windows: of how many chunks the window of each group is; None for full attention.
        first_group: a group of full attention, if there is one.

    Args:
        config: vLLM's `OffloadingConfig`.
        row_bytes: bytes of a row.
        tells_positions: whether this version of vLLM tells where a chunk ends in its prompt.
    """

    def __init__(self, config: Any, row_bytes: int, *, tells_positions: bool) -> None:
        self.spans, self.windows = group_spans(config), group_windows(config)
        full = [group for group, window in self.windows.items() if window is None]
        self.first_group = next(iter(full or self.spans))
        self._row_bytes, self._tells_positions = row_bytes, tells_positions
        self._has_warned = False
        self._num_ranks = config.parallel.world_size
        self._gaps: Mapping[int, Sequence[Span]] | None = {} if len(self.spans) == 1 else None

    def tell(self, told: Sequence[Parts]) -> None:
        """Take which bytes of a row each rank writes for a chunk of each group.

        One group always fills its row, so that its parts are not looked at.

        Raises:
            ConfigError: they are not known.
        """
        if len(self.spans) == 1:
            return
        if len(told) != self._num_ranks:
            raise ConfigError(
                f"{len(told)} of vLLM's {self._num_ranks} workers have told which bytes of a row "
                "they write: leave the tier of tieredkv out"
            )
        gaps = dict[int, Sequence[Span]]()
        for group in self.spans:
            spans = list[Span]()
            for parts in told:
                if (known := parts.get(group)) is None:
                    raise ConfigError(
                        "vLLM copies a whole block of the device into a row, with what other "
                        "groups of layers have left in it, so that keys and values of other "
                        "requests could reach the disk: leave `VLLM_KV_CACHE_LAYOUT` unset, so "
                        "that each layer is copied by itself; if it is not set, leave the tier of "
                        "tieredkv out"
                    )
                spans += known
            gaps[group] = gaps_in(self._row_bytes, spans)
        self._gaps = gaps

    def gaps(self, key: bytes) -> Sequence[Span] | None:
        """Return the bytes of a row that a chunk has not written; None until `tell` was called."""
        if self._gaps is None:
            if not self._has_warned:
                self._has_warned = True
                text = (
                    "vLLM's workers have not told which bytes of a row they write, so that nothing "
                )
                logger.warning(text + "is stored: is `TieredKVConnector` inside another connector?")
            return None
        return self._gaps.get(group_of(key), ())

    def position(self, key: bytes, context: Any) -> int | None:
        """Return the place of a chunk in its chain; None where vLLM does not tell it, as in 0.26.

        Such a chunk is stored as a chain of its own.
        """
        if not self._tells_positions:
            return None
        end, span = context.get_offload_key_position(key), self.spans.get(group_of(key))
        return None if end is None or span is None else max(0, -(-end // span) - 1)
