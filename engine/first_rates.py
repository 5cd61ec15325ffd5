"""The rates that the first plans are made with: measured at the start, or kept by an earlier run.

What is learnt while the engine runs is in `step_timer` and in the links themselves.
"""

from tieredkv.cache.rate_file import Machine, RateFile, disk_name
from tieredkv.cache.tiers import Tiers
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.model_runner import ModelRunner
from tieredkv.engine.step_timer import StepTimer
from tieredkv.types import BlockId, PageId

MEASURED_BYTES = 256 << 20
MOST_CPU_TOKENS = 64
"""Tokens of the largest step that is timed at the start on a CPU."""


def time_steps(
    runner: ModelRunner, timer: StepTimer, *, most_tokens: int, max_model_len: int, is_cpu: bool
) -> None:
    """Time steps of several sizes and positions.

    Args:
        runner: computes them.
        timer: learns from them.
        most_tokens: tokens of the largest step.
        max_model_len: the longest context.
        is_cpu: whether the device is a CPU, for which smaller steps have to do.
    """
    most_tokens = min(most_tokens, max_model_len, MOST_CPU_TOKENS if is_cpu else most_tokens)
    sizes = sorted({max(1, most_tokens >> shift) for shift in (0, 2, 4, 6)})
    shapes = [(size, 0) for size in sizes]
    shapes.append((sizes[-1], max_model_len - sizes[-1]))
    shapes.append((1, 0))
    for num_tokens, start in shapes:
        row = runner.idle_row(num_tokens, start)
        for teaches in (False, True):  # the first one of its kind may compile something
            timer.begin()
            runner.execute([row])
            timer.end([row], teaches=teaches)
    runner.synchronize()
    timer.poll()
    timer.rate.doubt()


def time_link(tiers: Tiers) -> None:
    """Copy pages that hold nothing yet into blocks that hold nothing yet, to time the link."""
    count = min(tiers.host.num_blocks, tiers.device.num_blocks, MEASURED_BYTES // tiers.block_bytes)
    link = tiers.device_link
    for _ in range(2):
        link.up_rate.doubt()  # the first copy also loads what copies need: only the second counts
        link.promote([(PageId(i), BlockId(i)) for i in range(count)], (0.0, ()))
        link.synchronize()
        link.poll()


def open_rate_file(folder: str, tiers: Tiers, model: LoadedModel) -> RateFile | None:
    """Take the rates of an earlier run from the store's folder; they will be kept there.

    Returns:
        None if the store is gone already, which `disk_trouble` tells.
    """
    try:
        disk = disk_name(folder)
    except OSError:
        return None
    machine = Machine(
        device=model.device_name,
        disk=disk,
        model=model.name,
        fingerprint=model.fingerprint.hex(),
        block_bytes=tiers.block_bytes,
    )
    return RateFile(
        folder,
        machine,
        read=tiers.disk_link.read_rate,
        write=tiers.disk_link.write_rate,
        up=tiers.device_link.up_rate,
        compute=tiers.compute_rate,
    )
