"""Where `doctor` tries the filesystem of a folder: never in the folder of a store or of keys."""

import errno
import os
from pathlib import Path

from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.keys.table_file import TABLE_SUFFIX


def folder_to_try(folder: Path) -> Path:
    """Return a folder of the same filesystem in which files can be made for a moment.

    It is the folder itself unless that is a store, and the one above it for a store.

    Raises:
        OSError: there is none; says why.
    """
    if not (folder / MARKER).exists():
        _check_owner(folder)
        return folder
    above = Path(os.path.realpath(folder)).parent
    if above.stat().st_dev != folder.stat().st_dev:
        raise OSError(errno.EXDEV, f"`{above}` is on another filesystem than the store")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"`{above}`, beside the store, cannot be written to")
    if any(above.glob(f"*{TABLE_SUFFIX}")):
        raise OSError(errno.EACCES, f"`{above}`, beside the store, is the folder of keys")
    _check_owner(above)
    return above


def _check_owner(folder: Path) -> None:
    """Refuse a folder whose owner could have root change files elsewhere, by a link for ours."""
    if (owner := folder.stat().st_uid) not in (0, os.geteuid()):
        raise OSError(errno.EACCES, f"`{folder}` belongs to uid {owner}; run it as that user")
