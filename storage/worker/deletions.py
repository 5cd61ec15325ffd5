"""Deletions that the engine asks for: a miss at once, and gone from the disk before the answer.

A deletion that the disk refuses is tried again by each sweep; until it succeeds, its blocks stay a
miss and it is not answered.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tieredkv.storage.messages.engine import DeleteCall, DeleteDone
from tieredkv.storage.ownership import owned_by
from tieredkv.storage.store import Store
from tieredkv.storage.worker.claims import Doomed
from tieredkv.storage.worker.fault_log import FaultLog
from tieredkv.storage.worker.loop import Loop
from tieredkv.storage.worker.writes import Writes


@dataclass(eq=False)
class Deletions:
    """The deletions that one worker was asked for; sections say which thread runs and owns what.

    Args:
        store: where blocks are stored.
        writes: the stores under way, which a deletion concerns too.
        log: told of failures.
        doomed: told of blocks that are being deleted.
        front, changes: the loops of the front thread and of the index thread.
        answer: sends an answer; called by the front thread.
    """

    store: Store
    writes: Writes
    log: FaultLog
    doomed: Doomed
    front: Loop
    changes: Loop
    answer: Callable[[DeleteDone], None]
    _refused: list[DeleteCall] = field(default_factory=list)  # by the disk; the index thread's

    # --- front thread --------------------------------------------------------------------------

    @owned_by("front")
    def begin(self, call: DeleteCall) -> None:
        """Make blocks a miss from now on, and have the index thread delete them."""
        self.doomed.names.update(call.hashes)
        self.changes.hand(partial(self._delete_beside_writes, call))

    @owned_by("front")
    def _end(self, call: DeleteCall) -> None:
        self.doomed.names -= Counter(call.hashes)
        self.answer(DeleteDone(call.job))

    # --- index thread --------------------------------------------------------------------------

    @owned_by("changes")
    def retry_refused(self) -> None:
        """Try deletions again that the disk refused."""
        refused, self._refused = self._refused, []
        for call in refused:
            self.writes.add_barrier(partial(self._delete_after_writes, call))

    @owned_by("changes")
    def _delete_beside_writes(self, call: DeleteCall) -> None:
        if self._delete(call) and not self.writes.are_under_way:
            self.front.hand(partial(self._end, call))
        else:  # these blocks may be among those being written
            self.writes.add_barrier(partial(self._delete_after_writes, call))

    @owned_by("changes")
    def _delete_after_writes(self, call: DeleteCall) -> None:
        if self._delete(call):
            self.front.hand(partial(self._end, call))
        else:
            self._refused.append(call)

    def _delete(self, call: DeleteCall) -> bool:
        delete = partial(self.store.drop, call.hashes, call.reason)
        return self.log.attempt("delete", delete) is not None
