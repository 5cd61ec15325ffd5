"""How the settings say that the store is opened, and what this process does with its names key."""

from tieredkv.config import Settings
from tieredkv.storage.options import StoreOptions
from tieredkv.wire.limits import forbid_core_files


def store_options(
    folder: str, settings: Settings, *, element_bytes: int = 2, tells_blocks: bool = False
) -> StoreOptions:
    """Return the options of the store in a folder.

    Args:
        folder: of the store.
        settings: those of the disk tier.
        element_bytes: of one number of keys and values.
        tells_blocks: whether the worker tells which blocks the store has, and which have left it.
    """
    of_disk = [each for each in settings.policies if each.may_use_disk]
    return StoreOptions(
        path=folder,
        disk_retentions=tuple(each.name for each in of_disk),
        budget_bytes=settings.disk_size,
        sync=settings.disk_sync,
        write_limit=settings.disk_write_limit,
        compression=settings.disk_compression,
        element_bytes=element_bytes,
        encryption=settings.disk_encryption,
        key_dir=settings.disk_key_dir,
        master_key=settings.disk_master_key,
        master_key_command=settings.disk_master_key_command,
        longest_s=max((each.absolute_s for each in of_disk), default=0.0),
        sweep_interval_s=settings.sweep_interval,
        clock_offset_file=settings.clock_offset_file,
        tells_blocks=tells_blocks,
    )


def guard_names_key(settings: Settings) -> None:
    """Have a crash of this process leave no core file if it is given the names key of a store.

    NOTE: called by our own processes only. A library leaves the limits of the user's process alone.
    """
    if settings.disk_dir is not None and settings.disk_encryption == "on":
        forbid_core_files()
