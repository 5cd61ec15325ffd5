"""`tieredkv doctor`: what this machine can do for each tier."""

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.controls import control_of
from tieredkv.cli.output import Answer, answering
from tieredkv.cli.probing import folder_to_try
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings, Settings
from tieredkv.environment import default_key_dir
from tieredkv.errors import ConfigError, StorageError
from tieredkv.operate.calls import Df
from tieredkv.storage.folder.filesystem import Call, Filesystem
from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.keys.place import check_writable
from tieredkv.storage.starts import is_on_one_volume
from tieredkv.units import format_bytes

LITTLE_FREE_BYTES = 1 << 30
LARGE_STEP_BYTES = 1 << 20

Finding = tuple[str, str, str]
"""The name of a check, its status (ok, warn or fail), and its result."""


@click.command()
@click.argument("model", required=False)
@settings_options(
    *("dtype", "device", "max_model_len", "rope_scaling"),
    *("block_size", "disk_dir", "disk_key_dir", "disk_read_limit"),
)
@answering
def doctor(loaded: LoadedSettings) -> Answer:
    """Check what this machine can do for each tier.

    It looks at Python, torch, the GPU, pinned memory and, with --disk-dir, the disk. The filesystem
    of a store is tried in a folder beside it, which is removed again. With a model
    it also tells how long prefixes take that host memory or the disk has: if all is computed, if
    all is loaded, and as planned, when the head is computed while the tail is loaded. These times
    are predicted from the rates that a server of this model has left in --disk-dir; without them
    the model is loaded and measured. The exit code is 1 if a check fails.

    \b
    Examples:
      tieredkv doctor --disk-dir /nvme/kv
      tieredkv doctor ./Llama-3.1-8B-Instruct --disk-dir /nvme/kv
    """
    settings = loaded.settings
    findings = [*_software(), *_memory(settings.host_size)]
    document: dict[str, Any] = {"needs": []}
    if settings.disk_dir is not None:
        findings += _disk(settings, document["needs"])
        if settings.disk_encryption == "on":
            findings.append(check_keys(settings.disk_dir, settings.disk_key_dir))
    if "fail" not in [status for _, status, _ in findings]:
        from tieredkv.cli import outlook

        rates = outlook.measure(settings)
        findings += rates.findings
        document["rates"] = rates.figures
        if settings.model:
            document["plans"] = outlook.plans(settings, rates)
            findings += map(outlook.described, document["plans"])
    checks = [dict(zip(("name", "status", "detail"), each, strict=True)) for each in findings]
    num_failed = [check["status"] for check in checks].count("fail")
    document |= {"checks": checks, "failed": num_failed}
    return Answer(document, checks, is_problem=num_failed > 0)


def _software() -> Iterator[Finding]:
    yield "python", "ok", platform.python_version()
    for name in ("torch", "transformers", "lmdb", "triton"):
        try:
            yield name, "ok", metadata.version(name)
        except metadata.PackageNotFoundError:  # only Triton may be missing
            yield name, "warn", "is not installed; it is needed to run on a GPU"
    import torch

    if not torch.cuda.is_available():
        yield "cuda", "warn", "torch sees no GPU; the engine runs on the CPU, in float32"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        detail = f"{gpu.name}, {format_bytes(gpu.total_memory)}, CUDA {torch.version.cuda}"
        yield f"cuda:{i}", "ok", detail


def _memory(host_size: int) -> Iterator[Finding]:
    needed = f"`host_size` = {format_bytes(host_size)}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield "memory that may be locked", "ok", "unlimited"
    else:
        status = "ok" if locked >= host_size else "warn"
        detail = f"{format_bytes(locked)} (`ulimit -l`), for {needed}"
        yield "memory that may be locked", status, detail
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = "ok" if host_size < total else "fail"
    yield "host memory", status, f"{format_bytes(total)}, for {needed}"


def _disk(settings: Settings, needs: list[Any]) -> Iterator[Finding]:
    """Look at a folder and its filesystem; what a store there needs is added to `needs`."""
    folder = Path(settings.disk_dir or "")
    if is_missing := not os.path.exists(folder):
        yield "disk folder", "ok", f"`{folder}` is not there yet; a server will make it"
        folder = next(it for it in folder.absolute().parents if os.path.exists(it))
    filesystem, untried = None, ""
    try:
        info = folder.stat()
        is_store = (folder / MARKER).exists()
        try:
            where = folder_to_try(folder)
            with tempfile.TemporaryDirectory(prefix=".tieredkv-doctor-", dir=where) as probe:
                filesystem = Filesystem.explore(probe)
        except OSError as error:
            if not is_store:
                raise
            untried = error.strerror or str(error)
    except OSError as error:
        what = f"cannot write to `{folder}`: {error.strerror}; choose another folder"
        yield "disk folder", "fail", what
        return
    mode = info.st_mode & 0o7777
    if is_missing:
        pass  # what lies above the folder may belong to others
    elif info.st_uid != os.getuid():
        what = f"`{folder}` belongs to uid {info.st_uid}, but this process runs as {os.getuid()}"
        yield (
            "permissions",
            "fail",
            f"{what}; run as that user, `chown` it or choose another folder",
        )
    elif mode & 0o022:
        what = f"{mode:04o}: `{folder}` is writable by others"
        yield "permissions", "fail", f"{what}; run `chmod go-w {folder}`"
    elif mode != 0o700:
        yield "permissions", "warn", f"{mode:04o}; a server will set it to 0700"
    else:
        yield "permissions", "ok", f"{mode:04o}"
    if is_store:
        yield _store(settings, needs)
    free = shutil.disk_usage(folder).free
    yield "free space", "ok" if free >= LITTLE_FREE_BYTES else "warn", format_bytes(free)
    if filesystem is None:
        what = f"could not be tried without writing into the store: {untried}"
        yield "filesystem", "warn", what
        return
    for call in filesystem.calls:
        yield _call(call)
    step = filesystem.growth_bytes
    if step > LARGE_STEP_BYTES:
        what = f"files grow by {format_bytes(step)} at once"
        detail = f"{what}, so a small `disk_size` holds few blocks"
        yield "space", "warn", detail


def check_keys(folder: str, key_dir: str | None) -> Finding:
    """Report whether a start could use the folder of keys, and whom encryption keeps out."""
    try:
        key_dir = os.path.abspath(key_dir or default_key_dir())
        check_writable(key_dir)
    except (ConfigError, StorageError) as error:
        return "folder of keys", "fail", str(error)
    if is_on_one_volume(os.path.abspath(folder), key_dir):
        what = (
            f"`{key_dir}` is on the volume of `disk_dir`: encryption protects copies of that folder"
        )
        return "folder of keys", "ok", f"{what}, not against those who can write to the volume"
    return "folder of keys", "ok", f"`{key_dir}` is on another volume than `disk_dir`"


def _store(settings: Settings, needs: list[Any]) -> Finding:
    """Look at the store; report its blocks and what it needs, or why it cannot be looked at."""
    try:
        df = control_of(settings).answer(Df())
    except StorageError as error:
        return "store", "fail", str(error)
    needs += df.get("needs", ())
    if needs:
        return "store", "fail", "; ".join(need["text"] for need in needs)
    return "store", "ok", f"can be read; it holds {df['disk']['blocks']} blocks"


def _call(call: Call) -> Finding:
    """Report whether one system call of the store works, and the effect if it does not."""
    if call.error is None:
        return call.name, "ok", "works"
    why = os.strerror(call.error.errno or 0)
    if call.is_refused:
        what = f"fails ({why}), and the store needs it {call.purpose}; choose another folder"
        return call.name, "fail", what
    if call.works:
        return call.name, "warn", f"could not be tested completely: {why}"
    return call.name, "warn", f"is not supported here ({why}): {call.without}"
