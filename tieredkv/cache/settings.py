"""What the operator sets of how blocks move between the tiers."""

from dataclasses import dataclass

from tieredkv.config import Restore


@dataclass(slots=True)
class CacheSettings:
    """How blocks move between the tiers.

    Attributes:
        restore: see the setting; `compute` promotes nothing.
        is_write_behind: write blocks to disk soon after they are computed, not only for room.
        drain_timeout_s: how long a stop may take to write what is owed to the disk.
        device_reserve_blocks: how many device blocks to keep clean ahead of need.
        load_timeout_s: a block that the disk has not loaded within this time is computed.
    """

    restore: Restore = "auto"
    is_write_behind: bool = False
    drain_timeout_s: float = 30.0
    device_reserve_blocks: int = 64
    load_timeout_s: float = 30.0
