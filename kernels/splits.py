"""How the host cuts attention's work: counts that depend on shapes only, never on device data.

A context is cut into splits, each attended by its own program, when requests x heads x query
tiles alone would leave multiprocessors idle; a second kernel merges the splits' partial results.
"""

import functools

import torch

WAVES = 4
"""Programs aimed at, in multiples of the multiprocessors: several are resident on each."""

MIN_SPLIT_TOKENS = 128
"""A shorter split costs more in merging than it saves."""

MAX_DECODE_SPLIT_TOKENS = 4096
"""A longer split would leave the longest request of a ragged decode batch running alone."""


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a CUDA device; Triton's interpreter passes for an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_splits(
    num_programs: int, max_context_len: int, num_sms: int, max_split_tokens: int | None = None
) -> int:
    """Choose into how many splits each context is cut.

    Args:
        num_programs: programs that run if nothing is split.
        max_context_len: tokens of the longest context, or a bound on it.
        num_sms: multiprocessors to fill.
        max_split_tokens: the longest split of the longest context, even if there are programs
            enough; None if the partial results would cost more than the imbalance.
    """
    wanted = -(-WAVES * num_sms // num_programs)
    if max_split_tokens is not None:
        wanted = max(wanted, -(-max_context_len // max_split_tokens))
    useful = -(-max_context_len // MIN_SPLIT_TOKENS)
    return max(1, min(wanted, useful))
