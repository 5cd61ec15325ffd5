"""What else could have served a request than the tier that a bench claims, and what tells.

- The page cache. The worker of the store reads with O_DIRECT where the filesystem has it
  (`page_cache`), and the kernel counts the bytes that it read from storage for the worker
  (`WorkerReads`). `DiskShare` says how they should compare with the bytes that were loaded.
- VRAM or host memory. The engine tells for each request how many tokens came from each tier.
- The prefix of an earlier repeat. It would be found in one of the tiers above, or on disk by an arm
  that claims no tier.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tieredkv.bench import raw
from tieredkv.engine.core import EngineCore
from tieredkv.storage.format.record import extent_bytes_for
from tieredkv.types import KVSpec, Tier

LEAST_SHARE, MOST_SHARE = 0.95, 1.2
MOST_OF_EXTENTS = 1.05


def page_cache(folder: Path) -> str:
    """Return whether reads of a store in this folder are certain to come from a disk.

    Returns:
        `bypassed` if there is a block device under the folder and the filesystem has O_DIRECT, else
        `warm`, as the bytes may come from memory.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        is_direct = raw.bypass_page_cache(file.fileno())
    return "bypassed" if is_direct and raw.block_device(folder) else "warm"


class WorkerReads:
    """The bytes that the kernel reads from storage for an engine's worker, from now on."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._pid = core.info.worker_pid
        self._before = self._count()

    def num_bytes(self) -> int | None:
        """Return the bytes so far; 0 without a disk tier.

        It is None if the kernel does not count them or the worker is another one by now.
        """
        if self._core.operations.disk is None:
            return 0
        now = self._count()
        if self._before is None or now is None or self._core.info.worker_pid != self._pid:
            return None
        return now - self._before

    def _count(self) -> int | None:
        return None if self._pid is None else raw.own_bytes(self._pid, "read")


def tokens_elsewhere(by_tier: Mapping[Tier, int], claimed: str | None) -> int:
    """Return how many tokens came from other tiers than the claimed one; None claims no tier."""
    return sum(count for tier, count in by_tier.items() if tier != claimed)


def are_from(
    by_tiers: Iterable[Mapping[Tier, int]], claimed: str | None, *, may_compute: bool
) -> bool:
    """Return whether all requests were served from the tier that is claimed.

    Args:
        by_tiers: tokens of each request by the tier that they came from.
        claimed: the tier; None if everything is to be computed.
        may_compute: whether a request may have computed everything.
    """
    return all(
        not tokens_elsewhere(each, claimed)
        and (claimed is None or may_compute or each[Tier(claimed)] > 0)
        for each in by_tiers
    )


def disk_over_loaded(from_disk: Sequence[int | None], loaded: Sequence[int]) -> float | None:
    """Return the bytes that the disk gave for each byte loaded, in the run where they are fewest.

    Runs that loaded nothing or whose bytes are not known are left out; None if there are no others.
    """
    shares = [
        given / wanted
        for given, wanted in zip(from_disk, loaded, strict=True)
        if given is not None and wanted
    ]
    return round(min(shares), 3) if shares else None


class DiskShare(NamedTuple):
    """How many bytes the disk should give for each byte that is loaded.

    Attributes:
        least: if it gives fewer, some came from memory.
        most: if it gives more, others were read, too.
    """

    least: float
    most: float

    @classmethod
    def expected(cls, settings: Mapping[str, Any], kv_spec: KVSpec) -> "DiskShare":
        """Return what holds for a store with these settings.

        Compressed blocks have fewer bytes on disk, so that nothing is known of the least. The
        headers of small blocks alone may be more than a fifth of their bytes.
        """
        is_compressed = settings.get("disk_compression", "off") != "off"
        extent_share = extent_bytes_for(kv_spec.block_bytes) / kv_spec.block_bytes
        most = max(MOST_SHARE, MOST_OF_EXTENTS * extent_share)
        return cls(0.0 if is_compressed else LEAST_SHARE, most)

    def problem(self, page_cache: str | None, share: float | None, *, may_exceed: bool) -> str:
        """Say what is wrong with the bytes that came from disk; nothing where it may be memory.

        Args:
            page_cache: as returned by `page_cache`; None if nothing is claimed to be from disk.
            share: as returned by `disk_over_loaded`.
            may_exceed: whether bytes may have been read that were not loaded in the end.
        """
        if page_cache != "bypassed" or share is None:
            return ""
        told = f"the disk gave {share:g} bytes for each byte loaded"
        if share < self.least:
            return f"{told}; the others came from memory"
        return f"{told}; others were read, too" if share > self.most and not may_exceed else ""
