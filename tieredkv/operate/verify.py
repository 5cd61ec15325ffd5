"""`verify`: every block against its checksums, the index against itself, and what is erased."""

import re
from collections import Counter
from typing import Any, ClassVar

import msgspec

from tieredkv.errors import ConfigError, CorruptIndexError, StorageError, StoreFailedError
from tieredkv.operate.chain_ids import namespace_prefix
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages import operator as messages
from tieredkv.storage.messages.operator import Checked, StoreFigures

_KEY_ID = re.compile(r"[0-9a-fA-F]{16}")


class Verify(Verb, frozen=True, kw_only=True, tag="verify"):
    """Compare every block on disk with its checksums, or look for what should be erased.

    Attributes:
        repair: whether bad blocks are dropped, and pages of windows whose block is not there.
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
        """Return `Findings`, or what is left to be erased.

        An index that cannot be read ends the worker, and its next start makes it again.

        Raises:
            EOFError: nobody but the caller will start one.
            StorageError: the store is stopped, and not everything in it can be seen.
        """
        asked = messages.Verify(
            repair=self.repair,
            sample=self.sample,
            erased_key=self.erased_key,
            erased_namespace=self.erased_namespace,
        )
        if self.is_proof:
            return _prove_erased(worker, asked)
        found, damage = Findings(), Checked(by_reason={"index": 1}, repaired=int(self.repair))
        if worker.own_index == "set_aside":  # the process before found it damaged
            found.add(damage)
        try:
            total = int(self.sample * worker.one(messages.Figures(), StoreFigures).stats.blocks)
            for part in worker.parts(asked, Checked):
                found.add(part)
                worker.progress(found.checked + found.window_pages, total)
        except (CorruptIndexError, StoreFailedError) as error:
            if not self.repair:
                raise
            if worker.own_index is not None:
                raise EOFError from error
            # Damage is made good by the next worker. It looks for it where this one does not know.
            is_repaired = isinstance(error, CorruptIndexError)
            found.add(msgspec.structs.replace(damage, repaired=int(is_repaired)))
        return dict(msgspec.to_builtins(found))


class Findings(msgspec.Struct, kw_only=True):
    """What `verify` found.

    Attributes:
        checked, window_pages: blocks, and pages of layers with windows, that were read.
        bad, by_reason, repaired: blocks and pages that were bad, and how many were dropped.
        stray_pages: pages of layers with windows whose block is not on disk.
    """

    checked: int = 0
    bad: int = 0
    by_reason: dict[str, int] = {}
    repaired: int = 0
    window_pages: int = 0
    stray_pages: int = 0

    def add(self, part: Checked) -> None:
        """Add what a part of the check has found."""
        self.checked += part.checked
        self.repaired += part.repaired
        self.window_pages += part.window_pages
        self.stray_pages += part.stray_pages
        self.bad += sum(part.by_reason.values())
        self.by_reason = dict(Counter(self.by_reason) + Counter(part.by_reason))


def _prove_erased(worker: Worker, asked: messages.Verify) -> dict[str, Any]:
    """Look for what is left of a key or of namespaces in every extent that was ever used."""
    if worker.looking is not None and not worker.looking.is_whole:
        why = "; ".join(need.text for need in worker.looking.needs)
        hint = "hint: run `tieredkv verify`, which makes the index again"
        raise StorageError(f"nothing can be proven, since {why}\n{hint}")
    found = worker.one(asked, Checked)
    left = {name: getattr(found, name) for name in ("keys", "blocks", "extents")}
    return {"erased": not any(left.values()), "checked": found.checked, **left}
