"""`verify`: every block against its checksums, the index against itself, and what is erased."""

from collections.abc import Callable
from typing import Any

import msgspec

from tieredkv.errors import CorruptIndexError, StoreFailedError
from tieredkv.operate.calls import Verify
from tieredkv.operate.infos import ErasureResult, VerifyResult
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages import operator as messages
from tieredkv.storage.messages.operator import Checked

VerbProgress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all) during a long verb."""

TakeStep = Callable[[messages.Verify], Checked]
"""Has the worker take one step."""


def verify(call: Verify, worker: Worker, progress: VerbProgress | None) -> dict[str, Any]:
    """Check the store step by step; or look for what should be erased.

    An index that cannot be read ends the worker, and its next start makes it again.

    Raises:
        EOFError: nobody but the caller will start one.
    """
    if call.erased_key or call.erased_namespace:
        proof = _prove_erased(call, worker)
        return {"erased": proof.is_erased, **msgspec.to_builtins(proof)}
    result, total = VerifyResult(), 0

    def take_step(step: messages.Verify) -> Checked:
        found = worker.verify(step)
        if progress is not None:
            progress(result.checked + found.checked, total)
        return found

    try:
        total = int(call.sample * worker.figures().stats.blocks)
        check(take_step, result, repair=call.repair, sample=call.sample)
    except (CorruptIndexError, StoreFailedError) as error:
        if not call.repair:
            raise
        if worker.is_own:
            raise EOFError from error
        # Damage is made good by the next worker. It looks for it where this one does not know.
        result.add("index", is_repaired=isinstance(error, CorruptIndexError))
    return dict(msgspec.to_builtins(result))


def check(
    take_step: TakeStep, result: VerifyResult, *, repair: bool = True, sample: float = 1.0
) -> None:
    """Check every payload, or a sample, then the index against itself.

    Args:
        take_step: takes one step.
        result: always holds the findings so far.
        repair: whether bad blocks are dropped, and a bad index is made again.
        sample: the part of the payloads that is read.
    """
    is_whole, last = _check_blocks(take_step, result, b"", repair=repair, sample=sample)
    found = take_step(messages.Verify(step="index", repair=repair, is_whole=is_whole))
    _add(result, found)
    if repair and not found.is_whole:
        # A walk that damage cut short goes on in the sound index.
        _check_blocks(take_step, result, last, repair=repair, sample=sample)


def _check_blocks(
    take_step: TakeStep, result: VerifyResult, after: bytes, *, repair: bool, sample: float
) -> tuple[bool, bytes]:
    """Check the payloads from a name on; return whether their entries are whole, and the end."""
    is_whole, is_last = True, False
    while not is_last:
        step = messages.Verify(step="blocks", after=after, repair=repair, sample=sample)
        found = take_step(step)
        _add(result, found)
        is_whole, is_last, after = is_whole and found.is_whole, found.is_last, found.next
    return is_whole, after


def _add(result: VerifyResult, found: Checked) -> None:
    result.checked += found.checked
    result.repaired += found.repaired
    result.bad += sum(found.by_reason.values())
    for reason, count in found.by_reason.items():
        result.by_reason[reason] = result.by_reason.get(reason, 0) + count


def _prove_erased(call: Verify, worker: Worker) -> ErasureResult:
    """Look for what is left of a key or of namespaces in every extent that was ever used."""
    proof, after, is_last = ErasureResult(), b"", False
    while not is_last:
        step = messages.Verify(
            step="extents",
            after=after,
            erased_key=call.erased_key,
            erased_namespace=call.erased_namespace,
        )
        found = worker.verify(step)
        for name in ErasureResult.__struct_fields__:
            setattr(proof, name, getattr(proof, name) + getattr(found, name))
        is_last, after = found.is_last, found.next
    return proof
