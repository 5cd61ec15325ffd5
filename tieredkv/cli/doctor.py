"""`tieredkv doctor`: what this machine can do for each tier."""

import os
import platform
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click

from tieredkv.cli.output import json_option, print_json, print_table
from tieredkv.cli.settings_options import disk_dir_option, settings_options
from tieredkv.config import LoadedSettings
from tieredkv.storage.extents import SegmentFiles
from tieredkv.units import format_bytes

LITTLE_FREE_BYTES = 1 << 30


class Check(NamedTuple):
    """One finding; `status` is ok, warn or fail."""

    name: str
    status: str
    detail: str


@click.command()
@disk_dir_option
@settings_options()
@json_option
def doctor(loaded: LoadedSettings, as_json: bool) -> int:
    """Check Python, torch, the GPU, pinned memory and the disk; exit 1 if something fails.

    \b
    Example:
      tieredkv doctor --disk-dir /nvme/kv
    """
    settings = loaded.settings
    checks = [*_software(), *_memory(settings.host_size)]
    if settings.disk_dir is not None:
        checks += _disk(Path(settings.disk_dir))
    num_failed = sum(check.status == "fail" for check in checks)
    rows = [check._asdict() for check in checks]
    if as_json:
        print_json({"checks": rows, "failed": num_failed})
    else:
        print_table(rows)
    return 1 if num_failed else 0


def _software() -> Iterator[Check]:
    yield Check("python", "ok", platform.python_version())
    for name in ("torch", "triton", "transformers", "lmdb"):
        try:
            yield Check(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            status = "warn" if name == "triton" else "fail"
            yield Check(name, status, "is not installed")
    import torch

    if not torch.cuda.is_available():
        yield Check("cuda", "warn", "torch sees no GPU; the engine runs on the CPU, in float32")
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        detail = f"{properties.name}, {format_bytes(properties.total_memory)}"
        yield Check(f"cuda:{i}", "ok", f"{detail}, CUDA {torch.version.cuda}")


def _memory(host_size: int) -> Iterator[Check]:
    needed = f"`host_size` is {format_bytes(host_size)}"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY
    status = "ok" if is_unlimited or soft >= host_size else "warn"
    detail = "unlimited" if is_unlimited else f"{format_bytes(soft)}; {needed} (see `ulimit -l`)"
    yield Check("memory that may be locked", status, detail)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = "ok" if host_size < total else "fail"
    yield Check("host memory", status, f"{format_bytes(total)}; {needed}")


def _disk(folder: Path) -> Iterator[Check]:
    if not folder.is_dir():
        yield Check("disk folder", "fail", f"`{folder}` is not a folder")
        return
    info = folder.stat()
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.getuid():
        yield Check("permissions", "fail", f"`{folder}` belongs to user {info.st_uid}")
    elif mode & 0o022:
        yield Check("permissions", "fail", f"{mode:04o}: others can write; chmod 700 `{folder}`")
    else:
        yield Check("permissions", "ok" if mode == 0o700 else "warn", f"{mode:04o}")
    free = shutil.disk_usage(folder).free
    yield Check("free space", "ok" if free >= LITTLE_FREE_BYTES else "warn", format_bytes(free))
    try:
        with tempfile.TemporaryDirectory(prefix=".tieredkv-doctor-", dir=folder) as probe:
            files = SegmentFiles(probe)
            has_direct_io, can_punch = files.direct_io, files.punch_hole
            files.close()
    except OSError as error:
        yield Check("disk folder", "fail", f"cannot write: {error.strerror}")
        return
    for name, is_there, without in (
        ("O_DIRECT", has_direct_io, "blocks go through the page cache"),
        ("hole punching", can_punch, "expired bytes are overwritten with zeroes"),
    ):
        yield Check(name, *(("ok", "works") if is_there else ("warn", f"not here: {without}")))
