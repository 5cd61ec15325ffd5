"""`tieredkv doctor`: what this machine can do for each tier."""

import os
import platform
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import click

from tieredkv.cli.output import json_option, print_json, print_table
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings
from tieredkv.storage.extents import SegmentFiles
from tieredkv.units import format_bytes

LITTLE_FREE_BYTES = 1 << 30

Check = dict[str, str]
"""One finding: its `name`, a `status` of ok, warn or fail, and a `detail`."""


@click.command()
@settings_options("disk_dir")
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
    num_failed = sum(check["status"] == "fail" for check in checks)
    if as_json:
        print_json({"checks": checks, "failed": num_failed})
    else:
        print_table(checks)
    return 1 if num_failed else 0


def _check(name: str, detail: str, *, is_ok: bool = True, otherwise: str = "warn") -> Check:
    return {"name": name, "status": "ok" if is_ok else otherwise, "detail": detail}


def _software() -> Iterator[Check]:
    yield _check("python", platform.python_version())
    for name in ("torch", "transformers", "lmdb"):
        yield _check(name, metadata.version(name))
    has_triton = find_spec("triton") is not None
    version = metadata.version("triton") if has_triton else "is not installed"
    yield _check("triton", version, is_ok=has_triton)
    import torch

    if not torch.cuda.is_available():
        what = "torch sees no GPU; the engine runs on the CPU, in float32"
        yield _check("cuda", what, is_ok=False)
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        detail = f"{gpu.name}, {format_bytes(gpu.total_memory)}, CUDA {torch.version.cuda}"
        yield _check(f"cuda:{i}", detail)


def _memory(host_size: int) -> Iterator[Check]:
    needed = f"`host_size` is {format_bytes(host_size)}"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY
    detail = "unlimited" if is_unlimited else f"{format_bytes(soft)}; {needed} (see `ulimit -l`)"
    yield _check("memory that may be locked", detail, is_ok=is_unlimited or soft >= host_size)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{format_bytes(total)}; {needed}"
    yield _check("host memory", detail, is_ok=host_size < total, otherwise="fail")


def _disk(folder: Path) -> Iterator[Check]:
    try:
        info = folder.stat()
        with tempfile.TemporaryDirectory(prefix=".tieredkv-doctor-", dir=folder) as probe:
            files = SegmentFiles(probe)
    except OSError as error:
        what = f"cannot write to `{folder}`: {error.strerror}"
        yield _check("disk folder", what, is_ok=False, otherwise="fail")
        return
    mode = stat.S_IMODE(info.st_mode)
    fault = ""
    if info.st_uid != os.getuid():
        fault = f"`{folder}` belongs to user {info.st_uid}"
    elif mode & 0o022:
        fault = f"{mode:04o}: others can write; chmod 700 `{folder}`"
    is_private, how_bad = mode == 0o700 and not fault, "fail" if fault else "warn"
    yield _check("permissions", fault or f"{mode:04o}", is_ok=is_private, otherwise=how_bad)
    free = shutil.disk_usage(folder).free
    yield _check("free space", format_bytes(free), is_ok=free >= LITTLE_FREE_BYTES)
    for name, works, without in (
        ("O_DIRECT", files.direct_io, "blocks go through the page cache"),
        ("hole punching", files.punch_hole, "expired bytes are overwritten with zeroes"),
    ):
        yield _check(name, "works" if works else f"not here: {without}", is_ok=works)
