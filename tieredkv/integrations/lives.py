"""Since when the chunks that another engine offers are there, and until when a disk may keep them.

A chunk is as old as its first offer, whoever offers it again. A state holds all tokens before it in
small, and so does any chunk of which a later token needs that one alone. Such a chunk is as old as
the oldest chunk of full attention before it: what a request of noon has computed from keys and
values of midnight is not there any more when those have expired.
"""

from collections.abc import Mapping

from tieredkv.integrations.ages import Ages
from tieredkv.integrations.tier_request import TierRequest
from tieredkv.retention import RetentionPolicies


class Lives:
    """Decides how long chunks live.

    Args:
        ages: of the first offers.
        policies: until when a retention keeps a chunk.
        spans: tokens of a chunk of each group.
        windows: of how many chunks the window of each group is; None for full attention.
    """

    def __init__(
        self,
        ages: Ages,
        policies: RetentionPolicies,
        spans: Mapping[int, int],
        windows: Mapping[int, int | None],
    ) -> None:
        self.ages, self._policies, self._spans = ages, policies, spans
        self._full = next((group for group, window in windows.items() if window is None), None)
        self._states = {group for group, window in windows.items() if window == 1}

    def is_early(self, request: TierRequest, key: bytes, position: int | None) -> bool:
        """Return whether a state for the disk is offered before what tells how old it is."""
        group = int.from_bytes(key[-4:], "big")
        if position is None or self._full is None or group not in self._states:
            return False
        may_use_disk = self._policies.get(request.retention, is_any=True).may_use_disk
        return may_use_disk and self._before(request, group, position) is None

    def of(
        self, request: TierRequest, key: bytes, position: int | None, now: float
    ) -> tuple[float, float | None]:
        """Return since when a chunk that is offered is there, and until when the disk may keep it.

        Only if the request has computed the chunk itself after its copies had expired does a new
        life begin. The deadline is None where the request's retention does not allow the disk, or
        where it is not known from what a state was computed.
        """
        first = self._since(request, key, position, now)
        if first is None:
            return now, None
        deadline = self._policies.disk_deadline((request.retention,), first, now)
        if deadline is not None and now >= deadline and request.has_computed(key, position):
            self.ages.forget(key)
            first = self._since(request, key, position, now)
            if first is None:
                return now, None
            deadline = self._policies.disk_deadline((request.retention,), first, now)
        return first, deadline

    def _since(
        self, request: TierRequest, key: bytes, position: int | None, now: float
    ) -> float | None:
        group, first = int.from_bytes(key[-4:], "big"), self.ages.note(key, now)
        if position is None or self._full is None:
            return first
        if group == self._full:
            request.chain.note(position, first)
        elif group in self._states:
            before = self._before(request, group, position)
            return None if before is None else self.ages.note(key, before)
        return first

    def _before(self, request: TierRequest, group: int, position: int) -> float | None:
        """Return since when the tokens are there that a state holds; None if not known."""
        assert self._full is not None
        end = (position + 1) * self._spans[group]
        return request.chain.oldest(-(-end // self._spans[self._full]))
