"""What the planner would do on this machine, for `tieredkv doctor`: its rates, and its plans."""

import contextlib
import dataclasses
import mmap
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

from tieredkv.bench import raw
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.disk_link import READ_LATENCY_S
from tieredkv.cache.plan import LinkState, Planner, outlook
from tieredkv.cache.rate_file import SavedRates, disk_name, read_rates
from tieredkv.cli.probing import folder_to_try
from tieredkv.config import Settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.loader import FoundModel, model_of
from tieredkv.types import KVSpec, Tier

LENGTHS = (2048, 8192, 32_768, 131_072)
NEW_TOKENS = 64
"""Tokens behind each prefix, which no tier has."""

RAW_BYTES = 256 << 20
RAW_THREADS = (4, 16, 32)

Finding = tuple[str, str, str]
Json = dict[str, Any]


class Rates(NamedTuple):
    """The rates of this machine.

    Attributes:
        h2d_GBps: of copies to the device.
        disk_GBps: of raw reads from the disk; None without one that can be measured.
        saved: what a server left in the store's folder; None without.
    """

    h2d_GBps: float
    disk_GBps: float | None
    saved: SavedRates | None
    findings: list[Finding]

    @property
    def figures(self) -> Json:
        """The rates for programs."""
        learnt = None
        if self.saved is not None:
            learnt = {
                "model": self.saved.machine.model,
                "device": self.saved.machine.device,
                "disk_read_GBps": _GBps(self.saved.read_bytes_per_s),
                "disk_write_GBps": _GBps(self.saved.write_bytes_per_s),
                "h2d_GBps": _GBps(self.saved.up_bytes_per_s),
            }
        raw_rates = {"h2d_GBps": self.h2d_GBps, "disk_read_GBps": self.disk_GBps}
        return {"raw": raw_rates, "learnt": learnt}


def measure(settings: Settings) -> Rates:
    """Measure the links, and read what an earlier server has learnt."""
    h2d, disk, saved, folder = raw.h2d_GBps(), None, None, settings.disk_dir
    told: list[Finding] = [("host memory to device", "ok", f"{h2d:.1f} GB/s, raw")]
    if folder is not None:
        name = "disk to host memory"
        try:
            disk = _disk_GBps(folder_to_try(Path(folder)))
            what = "warn", "cannot be measured: this filesystem has no O_DIRECT"
            told.append((name, *(("ok", f"{disk:.2f} GB/s, raw") if disk else what)))
        except OSError as error:
            told.append((name, "warn", f"cannot be measured: {error.strerror}"))
        saved, learnt = _learnt(folder)
        told.append(("learnt rates", *learnt))
    return Rates(h2d, disk, saved, told)


def plans(settings: Settings, rates: Rates) -> list[Json]:
    """Return the plan for prefixes of several lengths, from each tier that has a known rate."""
    found = model_of(settings)
    spec = found.kv_spec(settings.block_size)
    saved = rates.saved
    if saved is not None and (
        (saved.machine.model, saved.machine.device, saved.machine.block_bytes)
        != (found.name, found.device_name, spec.block_bytes)
    ):
        saved = None
    compute = _compute_rate(settings, found, spec, saved)
    up = (saved and saved.up_bytes_per_s) or rates.h2d_GBps * 1e9
    links = {Tier.HOST: LinkState(up, spec.block_bytes, is_steady=True)}
    read = (saved and saved.read_bytes_per_s) or (rates.disk_GBps or 0.0) * 1e9
    if read:
        limited = min(read, settings.disk_read_limit or read, up)  # its bytes pass through PCIe
        links[Tier.DISK] = LinkState(limited, spec.block_bytes, latency_s=READ_LATENCY_S)
    made: list[Json] = []
    for length in (each for each in LENGTHS if each <= found.max_model_len):
        cached = min(length, found.max_model_len - NEW_TOKENS) // spec.block_size * spec.block_size
        for tier, link in links.items():
            planner = Planner(
                [link],
                compute.prompt_times,
                block_size=spec.block_size,
                least_tokens=compute.least_tokens,
                is_cpu=found.device.type == "cpu",
            )
            split, compute_s, load_s = outlook(planner, cached, cached + NEW_TOKENS)
            times = {"compute": compute_s, "load": load_s, "planned": split.done_s}
            made.append(
                {"tier": str(tier), "prefix_tokens": cached}
                | {"split_token": min(split.block * spec.block_size, cached)}
                | {f"{name}_ms": round(1000 * it, 2) for name, it in times.items()}
            )
    return made


def described(plan: Json) -> Finding:
    """Return a plan for people."""
    computed, length = plan["split_token"], plan["prefix_tokens"]
    times = ", ".join(f"{name} {plan[f'{name}_ms']:,.0f} ms" for name in ("compute", "load"))
    what = f"computes {computed:,} tokens and loads {length - computed:,}"
    detail = f"{times}, planned {plan['planned_ms']:,.0f} ms: {what}"
    return f"{length:,} tokens on {plan['tier']}", "ok", detail


def _learnt(folder: str) -> tuple[SavedRates | None, tuple[str, str]]:
    """Return the rates that a server has left, and the status and the text of the finding."""
    try:
        saved = read_rates(folder)
        is_here = saved is None or saved.machine.disk == disk_name(folder)
    except (OSError, ValueError) as error:
        return None, ("warn", f"cannot be read, and will be learnt again: {error}")
    if not is_here:
        return None, ("warn", "are of another disk, and will be learnt again")
    if saved is None:
        return None, ("ok", "none yet; a server leaves them here")
    rates = {
        "disk": saved.read_bytes_per_s,
        "writes to disk": saved.write_bytes_per_s,
        "host memory": saved.up_bytes_per_s,
    }
    known = [f"{of} {rate / 1e9:.2f} GB/s" for of, rate in rates.items() if rate]
    steps = f"{len(saved.steps)} kinds of steps of `{saved.machine.model}`"
    return saved, ("ok", ", ".join([*known, f"{steps} on {saved.machine.device}"]))


def _compute_rate(
    settings: Settings, found: FoundModel, spec: KVSpec, saved: SavedRates | None
) -> ComputeRate:
    """Return the saved rate of computing, or measure it as an engine does when it starts."""
    if saved is not None:
        rate = ComputeRate(settings.resolve_max_num_alone_tokens(found.device.type))
        rate.assume(saved.known_steps)
        return rate
    core = EngineCore(dataclasses.replace(settings, disk_dir=None, host_size=8 * spec.page_bytes))
    try:
        return core.parts.tiers.compute_rate
    finally:
        core.close()


def _disk_GBps(folder: Path) -> float | None:
    """Return the best rate of several numbers of threads; None without O_DIRECT.

    Raises:
        OSError: the file that is read cannot be written.
    """
    buffers = [memoryview(mmap.mmap(-1, raw.READ_BYTES)) for _ in range(max(RAW_THREADS))]
    for buffer in buffers:
        buffer[:] = random.Random(0).randbytes(len(buffer))
    order = random.Random(1).sample(range(num := RAW_BYTES // raw.READ_BYTES), num)
    with contextlib.closing(raw.RawFile(folder, num, buffers)) as file:
        if not file.is_direct:
            return None
        return max(file.move_GBps(os.preadv, order, threads) for threads in RAW_THREADS)


def _GBps(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else round(bytes_per_s / 1e9, 3)
