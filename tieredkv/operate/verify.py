"""`verify`: every block against its checksums, the index against itself, and what is erased."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from tieredkv.errors import ConfigError, CorruptIndexError, StorageError, StoreFailedError
from tieredkv.operate.chain_ids import namespace_prefix
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages import operator as messages
from tieredkv.storage.messages.operator import Checked

TakeStep = Callable[[messages.Verify], Checked]
"""Has the worker take one step."""

_KEY_ID = re.compile(r"[0-9a-fA-F]{16}")


class VerifyResult(msgspec.Struct, kw_only=True):
    """What `verify` found."""

    checked: int = 0
    bad: int = 0
    by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    repaired: int = 0

    def add(self, found: Checked) -> None:
        """Add what one step has found."""
        self.checked += found.checked
        self.repaired += found.repaired
        self.bad += sum(found.by_reason.values())
        for reason, count in found.by_reason.items():
            self.by_reason[reason] = self.by_reason.get(reason, 0) + count


class Verify(Verb, frozen=True, kw_only=True, tag="verify"):
    """Compare every block on disk with its checksums, or look for what should be erased.

    Attributes:
        repair: whether bad blocks are dropped.
        sample: the part of the blocks that is read, chosen by chance; 1.0 for all.
        erased_key: look for what is left of this payload key, which has 16 hexadecimal digits.
        erased_namespace: look for what is left of the namespaces whose digests begin so, in hex.
    """

    needs_disk: ClassVar[bool] = True
    mends: ClassVar[bool] = True

    repair: bool = True
    sample: float = 1.0
    erased_key: str = ""
    erased_namespace: str = ""

    @property
    def is_proof(self) -> bool:
        """Whether it looks for what should be erased."""
        return bool(self.erased_key or self.erased_namespace)

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether it drops bad blocks."""
        return self.repair and not self.is_proof

    def check(self) -> None:
        """Refuse a part that is none, two things to look for, and what is no id of a key."""
        if not 0 < self.sample <= 1:
            raise ConfigError(f"`sample` = {self.sample} must be above 0 and at most 1")
        if self.erased_key and self.erased_namespace:
            raise ConfigError("give either `erased_key` or `erased_namespace`")
        if self.erased_namespace:
            namespace_prefix(self.erased_namespace)
        if self.erased_key and not _KEY_ID.fullmatch(self.erased_key):
            what = f"`{self.erased_key}` is no id of a key, which has 16 hexadecimal digits"
            raise ConfigError(f"{what}; `evict` prints the ids")

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return `{"checked", "bad", "by_reason", "repaired"}`, or what is left to be erased.

        An index that cannot be read ends the worker, and its next start makes it again.

        Raises:
            EOFError: nobody but the caller will start one.
        """
        if self.is_proof:
            return self._prove_erased(worker)
        result, total = VerifyResult(), 0
        damage = Checked(by_reason={"index": 1}, repaired=int(self.repair))
        if worker.follows_damage:
            result.add(damage)

        def take_step(step: messages.Verify) -> Checked:
            found = worker.verify(step)
            worker.progress(result.checked + found.checked, total)
            return found

        try:
            total = int(self.sample * worker.figures().stats.blocks)
            check(take_step, result, repair=self.repair, sample=self.sample)
        except (CorruptIndexError, StoreFailedError) as error:
            if not self.repair:
                raise
            if worker.is_own:
                raise EOFError from error
            # Damage is made good by the next worker. It looks for it where this one does not know.
            is_repaired = isinstance(error, CorruptIndexError)
            result.add(msgspec.structs.replace(damage, repaired=int(is_repaired)))
        return dict(msgspec.to_builtins(result))

    def _prove_erased(self, worker: Worker) -> dict[str, Any]:
        """Look for what is left of a key or of namespaces in every extent that was ever used.

        Raises:
            StorageError: the store is stopped, and not everything in it can be seen.
        """
        if worker.looking is not None and not worker.looking.is_whole:
            why = "; ".join(need.text for need in worker.looking.needs)
            hint = "hint: run `tieredkv verify`, which makes the index again"
            raise StorageError(f"nothing can be proven, since {why}\n{hint}")
        left, found = dict.fromkeys(("checked", "keys", "blocks", "extents"), 0), Checked()
        while not found.is_last:
            step = messages.Verify(
                step="extents",
                after=found.next,
                erased_key=self.erased_key,
                erased_namespace=self.erased_namespace,
            )
            found = worker.verify(step)
            left = {name: count + getattr(found, name) for name, count in left.items()}
        return {"erased": not (left["keys"] or left["blocks"] or left["extents"]), **left}


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

    def check_blocks(after: bytes) -> tuple[bool, bytes]:
        """Check the payloads from a name on; return whether all was whole, and the end."""
        is_whole, found = True, Checked(next=after)
        while not found.is_last:
            step = messages.Verify(step="blocks", after=found.next, repair=repair, sample=sample)
            result.add(found := take_step(step))
            is_whole &= found.is_whole
        return is_whole, found.next

    is_whole, last = check_blocks(b"")
    found = take_step(messages.Verify(step="index", repair=repair, is_whole=is_whole))
    result.add(found)
    if repair and not found.is_whole:
        check_blocks(last)  # a walk that damage cut short goes on in the sound index
