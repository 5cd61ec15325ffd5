"""Makes filesystems of all kinds in images and mounts them, which needs root and their tools."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IMAGE_BYTES = 400 << 20


class Filesystem(NamedTuple):
    """How a filesystem is made and mounted. One without `mkfs` is not made in an image."""

    mkfs: tuple[str, ...] = ()
    kind: str = ""
    options: str = ""


FILESYSTEMS = {
    "ext4": Filesystem(("mkfs.ext4", "-q")),
    "ext4, no extents": Filesystem(("mkfs.ext4", "-q", "-O", "^extent,^64bit")),
    "ext4, bigalloc 64 KiB": Filesystem(("mkfs.ext4", "-q", "-O", "bigalloc", "-C", "65536")),
    "ext3": Filesystem(("mkfs.ext3", "-q")),
    "ext2": Filesystem(("mkfs.ext2", "-q")),
    "ext2, 1 KiB blocks": Filesystem(("mkfs.ext2", "-q", "-b", "1024")),
    "xfs": Filesystem(("mkfs.xfs", "-q", "-m", "reflink=1")),
    "xfs, extent size hint of 1 MiB": Filesystem(("mkfs.xfs", "-q", "-d", "extszinherit=256")),
    "btrfs": Filesystem(("mkfs.btrfs", "-q")),
    "btrfs, compressed": Filesystem(("mkfs.btrfs", "-q"), "btrfs", "compress-force=zstd"),
    "f2fs": Filesystem(("mkfs.f2fs", "-q")),
    "vfat": Filesystem(("mkfs.vfat",)),
    "exfat": Filesystem(("mkfs.exfat",)),
    "tmpfs": Filesystem((), "tmpfs", "huge=never"),
    "tmpfs, huge pages": Filesystem((), "tmpfs", "huge=always"),
    "overlay": Filesystem((), "overlay"),
}


class CannotMountError(Exception):
    """This machine cannot make or mount a filesystem; the message says why."""


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise CannotMountError(f"`{command[0]}` is not installed") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        why = lines[0].rpartition(": ")[2] if lines else f"exit code {done.returncode}"
        raise CannotMountError(f"`{command[0]}` failed: {why}")


@contextlib.contextmanager
def mounted(filesystem: Filesystem, image_bytes: int = IMAGE_BYTES) -> Iterator[Path]:
    """Make and mount a filesystem, yield its folder, and remove it afterwards.

    Raises:
        CannotMountError: This machine cannot make or mount it.
    """
    with tempfile.TemporaryDirectory(prefix="tieredkv-filesystems-") as name:
        folder, image = Path(name), Path(name) / "image"
        disk = folder / "disk"
        disk.mkdir()
        options = [filesystem.options] if filesystem.options else []
        source = filesystem.kind
        if filesystem.mkfs:
            with image.open("wb") as file:
                file.truncate(image_bytes)
            _run(*filesystem.mkfs, str(image))
            options, source = [*options, "loop"], str(image)
        elif filesystem.kind == "tmpfs":
            options.append(f"size={image_bytes}")
        elif filesystem.kind == "overlay":
            for part in ("lower", "upper", "work"):
                (folder / part).mkdir()
            parts = (f"{part}dir={folder / part}" for part in ("lower", "upper", "work"))
            options.append(",".join(parts))
        kind = ["-t", filesystem.kind] if filesystem.kind else []
        _run("mount", *kind, "-o", ",".join(options), source, str(disk))
        try:
            yield disk
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
