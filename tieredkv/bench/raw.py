"""Raw limits of this machine, measured in the same run as the figures compared with them."""

import contextlib
import fcntl
import itertools
import mmap
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tieredkv

READ_BYTES = 2 << 20
READ_THREADS = 4
BEST_THREADS = (4, 16, 32)
"""Numbers of threads of which one reads about as fast as a disk can."""


def hardware() -> dict[str, object]:
    """Describe this machine: processor, cores, memory, GPU and software."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_GiB": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """Return the commit of the source tree, with `-dirty` if changed, or else the version."""
    root = Path(tieredkv.__file__).resolve().parent.parent
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        described = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
        return described.stdout.strip()
    return f"v{tieredkv.__version__}"


def head(commit_told: str | None, program: str = "tieredkv") -> dict[str, Any]:
    """Return the start of a report: hardware, commit, and the command line of this process."""
    command = shlex.join([*program.split(), *sys.argv[1:]])
    return {"hardware": hardware(), "commit": commit_told or commit(), "command": command}


def device() -> str:
    """Return `cuda` if there is a GPU, else `cpu`; device memory is then ordinary memory."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(call: Callable[[], object], *, repeats: int = 10) -> float:
    """Return the median time of a call; the device is idle before and after each call."""
    times = []
    for _ in range(repeats + 1):  # the first run is a warm-up
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def percentiles(values: Sequence[float], shares: Sequence[int]) -> dict[str, Any]:
    """Return percentiles, named as `p50`; each is None if there are no values."""
    made = np.percentile(values, shares).tolist() if values else [None] * len(shares)
    return {f"p{share}": each for share, each in zip(shares, made, strict=True)}


def percentiles_ms(name: str, values: Sequence[float], shares: Sequence[int]) -> dict[str, Any]:
    """Return percentiles, named as `NAME_p50_ms`; each is None if there are no values."""
    return {f"{name}_{key}_ms": ms for key, ms in percentiles(values, shares).items()}


def copy_GBps() -> float:
    """Return the copy bandwidth of device memory; bytes read and bytes written both count."""
    source = torch.ones((1 << 28) if torch.cuda.is_available() else (1 << 24), device=device())
    target = torch.empty_like(source)
    return round(2 * source.nbytes / median_s(lambda: target.copy_(source)) / 1e9, 2)


def gemm_TFLOPs(dtype: str) -> float:
    """Return the rate of a large square matrix product."""
    size = 8192 if torch.cuda.is_available() else 1024
    left = torch.randn(size, size, device=device()).to(getattr(torch, dtype))
    out = torch.empty_like(left)
    took_s = median_s(lambda: [torch.matmul(left, left, out=out) for _ in range(10)], repeats=5)
    return round(10 * 2 * size**3 / took_s / 1e12, 3)


def h2d_GBps() -> float:
    """Return the rate of one large copy from host memory to the device.

    Without a GPU, this is a copy within ordinary memory.
    """
    is_pinned = torch.cuda.is_available()
    num_bytes = (1 << 28) if is_pinned else (1 << 26)
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).random_()
    target = torch.empty_like(source, device=device())
    copy = partial(target.copy_, source, non_blocking=True)
    return round(num_bytes / median_s(copy) / 1e9, 2)


def bypass_page_cache(fd: int) -> bool:
    """Have a file read and written with O_DIRECT; return whether its filesystem can do that."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class RawFile:
    """A file of blocks that is read and written without the page cache, to measure the disk.

    `is_direct` is False on a filesystem without O_DIRECT; the page cache is then measured instead.

    Args:
        folder: where the file is made. The file has no name and vanishes when it is closed.
        num_blocks: the file's size in blocks.
        buffers: memory that blocks are written from and read into, one block each.
    """

    def __init__(self, folder: Path, num_blocks: int, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._fd, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
        self.is_direct = bypass_page_cache(self._fd)
        self.close = partial(os.close, self._fd)
        self.move_GBps(os.pwritev, range(num_blocks), 1)

    def move_GBps(self, move: Callable[..., int], blocks: Sequence[int], num_threads: int) -> float:
        """Return the rate at which threads read (`os.preadv`) or write (`os.pwritev`) blocks."""
        left = zip(blocks, itertools.cycle(self._buffers), strict=False)

        def work(_: int) -> None:
            for block, buffer in left:  # threads share the iterator
                move(self._fd, [buffer], block * len(buffer))

        start = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, range(num_threads)))
        os.fdatasync(self._fd)
        return len(blocks) * len(self._buffers[0]) / (time.perf_counter() - start) / 1e9


class RawDisk:
    """A file that is read at random without the page cache, as often as wanted.

    Args:
        folder: where the file is made.
        num_bytes: the size of the file.
        threads: numbers of threads that read, one after the other.
    """

    def __init__(self, folder: Path, num_bytes: int, threads: Sequence[int]) -> None:
        self._threads, self._num_blocks = threads, num_bytes // READ_BYTES
        buffers = [memoryview(mmap.mmap(-1, READ_BYTES)) for _ in range(max(threads))]
        for buffer in buffers:
            buffer[:] = random.Random(0).randbytes(READ_BYTES)
        self._file = RawFile(folder, self._num_blocks, buffers)
        self.close = self._file.close

    def read_GBps(self, num_bytes: int) -> list[float]:
        """Return the rate of reading so many bytes, which may be more than the file has.

        Returns:
            One for each number of threads; empty without O_DIRECT.
        """
        if not self._file.is_direct:
            return []
        num_reads = num_bytes // READ_BYTES
        whole = list(range(self._num_blocks)) * -(-num_reads // self._num_blocks)
        order = random.sample(whole, num_reads)
        return [self._file.move_GBps(os.preadv, order, count) for count in self._threads]

    def best_GBps(self) -> float | None:
        """Return the best rate of reading the whole file twice; None without O_DIRECT."""
        num_bytes = self._num_blocks * READ_BYTES
        rates = [rate for _ in range(2) for rate in self.read_GBps(num_bytes)]
        return round(max(rates), 2) if rates else None


def disk_read_GBps(
    folder: Path, *, num_bytes: int, threads: Sequence[int] = (READ_THREADS,)
) -> float | None:
    """Return the rate of random 2 MiB O_DIRECT reads from a new file.

    It is None if the filesystem has no O_DIRECT, because reads then come from memory.

    Args:
        folder: where the file is made.
        num_bytes: the size of the file.
        threads: numbers of threads that read; the best one counts.
    """
    with contextlib.closing(RawDisk(folder, num_bytes, threads)) as disk:
        return disk.best_GBps()


def drop_cached(folder: Path) -> None:
    """Drop the files of a folder from the page cache; no process may have them mapped."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def counters(folder: Path, pid: int | None) -> dict[str, float]:
    """Return the time, the processor seconds used by a process, and the bytes moved so far.

    `read` and `write` are the bytes that the block device under the folder has moved for all
    processes; `own_read` and `own_write` are the bytes moved for this process alone. Without a
    block device, `read` and `write` equal the process's own bytes.
    """
    own = {name: own_bytes(pid, name) or 0 for name in ("read", "write")}
    figures = {"s": time.perf_counter(), "core_s": 0.0, **own}
    figures |= {f"own_{name}": count for name, count in own.items()}
    if (device := block_device(folder)) is not None:
        sectors = Path(f"/sys/class/block/{device}/stat").read_text().split()
        figures |= {"read": int(sectors[2]) * 512, "write": int(sectors[6]) * 512}
    with contextlib.suppress(OSError):  # the process has ended
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        figures["core_s"] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return figures


def own_bytes(pid: int | None, direction: str) -> int | None:
    """Return how many bytes a process has caused to be `read` from storage or to `write` to it.

    It is None if the process has ended or the kernel does not count them.
    """
    count = _field(f"/proc/{pid}/io", f"{direction}_bytes")
    return None if count is None else int(count)


def block_device(folder: Path) -> str | None:
    """Return the name of the block device under a folder, or None if it has no counters."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return device.resolve().name if (device / "stat").exists() else None


def _field(path: str, name: str) -> str | None:
    """Return one field of a /proc file, or None if the file or the field is missing."""
    with contextlib.suppress(OSError):
        fields = (line.partition(":") for line in Path(path).read_text().splitlines())
        return next((value.strip() for key, _, value in fields if key.strip() == name), None)
    return None
