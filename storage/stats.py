"""The figures of a store: plain values that can be sent to another process."""

import msgspec

from tieredkv.tier import TierFigures


class Lifetimes(msgspec.Struct, kw_only=True):
    """How long the disk keeps blocks, by retention policy; see `tieredkv.storage.lifetimes`.

    Attributes:
        measured_s: the time that the write rates were measured for, at most the last two hours.
        write_bytes_per_s: the present write rate, in bytes of extents; empty until it was measured
            for ten minutes, like all that is told by it.
        promised_s: from the computation of the blocks that were written to their expiry.
        expected_s: age at which such blocks will leave the disk on average, evicted or expired.
        needed_bytes: the `disk_size` that would keep every promise; None until the rate is known.
        ages_since: since when evicted and expired blocks count: for the last one or two days.
        evicted_age_p1_s, evicted_age_p50_s: age since their computation of the blocks that had to
            make room for others, to within 5 %; 1 % and half of them were not older.
        shortfall: why the promises will not be kept, and what would help; empty if they will.
    """

    measured_s: float = 0.0
    write_bytes_per_s: dict[str, float] = {}
    promised_s: dict[str, float] = {}
    expected_s: dict[str, float] = {}
    needed_bytes: int | None = None
    ages_since: float = 0.0
    num_evicted: dict[str, int] = {}
    num_expired: dict[str, int] = {}
    evicted_age_p1_s: dict[str, float] = {}
    evicted_age_p50_s: dict[str, float] = {}
    shortfall: str = ""


class Need(msgspec.Struct, frozen=True):
    """What a stopped store needs, as a verb that only looks has found.

    Attributes:
        code: for programs; docs/disk.md lists them.
        text: what is so, and what the next start of a server does about it.
    """

    code: str
    text: str


class StoreStats(TierFigures, frozen=True, kw_only=True):
    """Figures of a store since it was opened, sizes as they are now.

    Attributes:
        blocks, bytes_live: stored blocks and their payload, expired ones not yet swept included.
        window_pages, window_bytes: those of them that are pages of layers with windows.
        bytes_files: what all files occupy (`st_blocks`), index included.
        bytes_index: what everything but the segment files occupies.
        bytes_pending: extents lent or waiting to be erased.
        bytes_written: headers, payload and padding written to the device; index pages are not
            counted.
        bytes_written_ever: the same since the store, or its index after a loss of it, was made.
        bytes_write_limit: bytes that may be written per second; None for no limit.
        num_extents_retired: extents that failed twice and are left alone.
        faults: cache faults in the store's life by reason; each was a miss, a block that was not
            stored, or (`index`) an index that was made again.
        deleted: blocks deleted on request by reason.
        encryption: `on`, `off`, or `no keys` if the store is encrypted and served without them.
        num_keys: payload keys, one for each namespace and hour of computing.
        compression, is_compressing: the setting, and whether new blocks are compressed.
        compression_trial: result of the trial of `auto`: the ratio, and the bytes per second
            decoded by one thread and read by all; empty before the trial.
        compression_ratio: bytes of the stored blocks before compression, divided by bytes after
            it; 0 if there are none.
        compression_rate, decompression_rate: bytes of blocks per second of one thread's time; 0 if
            nothing was packed or unpacked yet.
        store_error: why the last blocks could not be stored; empty once one was stored again.
        num_other_model: blocks that were of another model than the engine's when this model was
            loaded, so that no request can use them; None while they are not counted.
        num_lookups_dropped, num_touches_dropped: calls not carried out, because too much was
            waiting for a stuck worker; a dropped lookup is a miss, a dropped touch is lost.
        lifetimes: how long blocks are kept.
    """

    window_pages: int = 0
    window_bytes: int = 0
    bytes_index: int = 0
    bytes_pending: int = 0
    bytes_written_ever: int = 0
    bytes_write_limit: int | None = None
    bytes_erased: int = 0
    num_extents_retired: int = 0
    encryption: str = ""
    num_keys: int = 0
    compression: str = ""
    is_compressing: bool = False
    compression_trial: dict[str, float] = msgspec.field(default_factory=dict)
    compression_ratio: float = 0.0
    compression_rate: float = 0.0
    decompression_rate: float = 0.0
    direct_io: bool = False
    punch_hole: bool = False
    store_error: str = ""
    num_other_model: int | None = None
    num_lookups_dropped: int = 0
    num_touches_dropped: int = 0
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)


NO_STATS = StoreStats()
"""The figures of a store that was not opened yet."""
