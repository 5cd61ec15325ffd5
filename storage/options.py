"""How a store is opened and served: plain values that can be sent to the worker."""

from typing import Literal

import msgspec

BUSY_PATIENCE_S = 5.0
DAY_S = 86_400.0


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker opens and serves one store.

    Attributes:
        path: the store's folder.
        budget_bytes: what its files may occupy, index included; None keeps the last budget.
        sync: `commit` flushes every group commit to the device; `none` leaves flushing to the
            system, which still lets blocks survive `kill -9`.
        compression, element_bytes: see `tieredkv.storage.format.planes.Packing`.
        encryption: whether the store is encrypted; one that is not as the setting says is refused.
            `as_it_is`, of verbs, goes by the store and does without its keys where they are not
            there: no payload can be read then.
        key_dir, master_key, master_key_command: see `tieredkv.storage.keys.store_keys`.
        longest_s: the longest `absolute` of the retention policies that allow the disk tier. A
            payload key dies so long after its hour, whatever the index says of its blocks.
        sweep_interval_s: expired bytes are erased within this time.
        create: whether to make a new store if the folder is none.
        write_limit: bytes a second that may be written; 0 for no limit.
        disk_retentions: names of the retention policies that allow the disk tier; a block of any
            other policy is refused by the worker, whatever the engine says.
        clock_offset_file: see `tieredkv.clock`.
        num_readers, num_writers: threads that move payloads; see `writers`.
        backoff_s, max_backoff_s: first and longest pause before a dead worker is started again;
            the pause doubles each time.
        tells_blocks: whether the worker tells which blocks the store has, and which have left it.
        busy_patience_s: how long the first start waits for another writer to go, such as the worker
            of an engine that was killed a moment ago.
    """

    path: str
    budget_bytes: int | None = None
    sync: Literal["commit", "none"] = "commit"
    compression: Literal["off", "on", "auto"] = "off"
    element_bytes: int = 2
    encryption: Literal["off", "on", "as_it_is"] = "off"
    key_dir: str | None = None
    master_key: str | None = None
    master_key_command: str | None = None
    longest_s: float = DAY_S
    sweep_interval_s: float = 10.0
    create: bool = True
    write_limit: int = 0
    disk_retentions: tuple[str, ...] = ("24h",)
    clock_offset_file: str | None = None
    num_readers: int = 32
    num_writers: int = 8
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    busy_patience_s: float = BUSY_PATIENCE_S
    tells_blocks: bool = False

    def writers(self, *, is_encrypted: bool) -> int:
        """Return how many threads write payloads.

        They are more where they encrypt, so that the disk does not wait meanwhile.
        """
        return self.num_writers + (self.num_writers // 2 if is_encrypted else 0)
