"""Where `doctor` tries the filesystem of a folder: never in the folder of a store."""

import errno
import os
from pathlib import Path

from tieredkv.storage.folder.marker import MARKER


def folder_to_try(folder: Path) -> Path:
    """Return a folder of the same filesystem in which files can be made for a moment.

    It is the folder itself unless that is a store, and the one above it for a store.

    Raises:
        OSError: there is none; says why.
    """
    if not (folder / MARKER).exists():
        return folder
    above = Path(os.path.realpath(folder)).parent
    if above.stat().st_dev != folder.stat().st_dev:
        raise OSError(errno.EXDEV, f"`{above}` is on another filesystem than the store")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"`{above}`, beside the store, cannot be written to")
    return above
