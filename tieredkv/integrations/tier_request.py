"""What a tier of another engine knows of one request."""

from dataclasses import dataclass, field

from tieredkv.integrations.ages import ChainAge
from tieredkv.integrations.heads import Asked
from tieredkv.integrations.identity import Identity
from tieredkv.integrations.restore_choice import Choice
from tieredkv.tier import Times


@dataclass(eq=False, slots=True)
class TierRequest:
    """One request, as far as it has shown itself.

    Attributes:
        id: its name.
        identity: names its chunks.
        retention: the policy that it asked for.
        root, namespace: of the tenant's chunks.
        is_announced: whether its chunks are announced to routers.
        asked: chunks that are being looked up.
        shown: all that it asked for, by place.
        answers: the times of what was found, by chunk; None for a miss.
        choice: whether its head is loaded, once that is known.
        too_long: the group whose head is longer than the engine's memory, and the place at which it
            ends.
        missed_at: the place of the chunk that it was last told to compute, in the first group.
        chain: since when its chunks of full attention are there.
        num_offered: chunks that it has offered and nobody has looked at.
        is_over: whether no more chunks of it will be offered.
    """

    id: str
    identity: Identity
    retention: str
    root: bytes
    namespace: bytes
    is_announced: bool
    asked: set[bytes] = field(default_factory=set)
    shown: Asked = field(default_factory=Asked)
    choice: Choice | None = None
    too_long: tuple[int, int] | None = None
    missed_at: int | None = None
    answers: dict[bytes, Times | None] = field(default_factory=dict)
    chain: ChainAge = field(default_factory=ChainAge)
    num_offered: int = 0
    is_over: bool = False
    _hashes: dict[bytes, bytes] = field(default_factory=dict)  # by key
    _by_place: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    _computes_from: dict[bytes, int] = field(default_factory=dict)  # by group

    def hash(self, key: bytes) -> bytes:
        """Return the name of a chunk that the engine knows by `key`; it is computed once."""
        if (block_hash := self._hashes.get(key)) is None:
            block_hash = self._hashes[key] = self.identity.block_hash(self.root, key)
        return block_hash

    def note_place(self, key: bytes, position: int | None) -> None:
        """Note the place of a chunk in its chain, if the engine tells it."""
        if position is not None:
            self._by_place[key[-4:], position] = self.hash(key)

    def before(self, key: bytes, position: int | None) -> bytes:
        """Return the chunk before one, or the root where the request has not shown it."""
        return self._by_place.get((key[-4:], (position or 0) - 1), self.root)

    def note_computes_from(self, group: bytes, position: int) -> None:
        """Note that it computes a group's chunks itself from a position on."""
        first = self._computes_from.get(group, position)
        self._computes_from[group] = min(first, position)

    def has_computed(self, key: bytes, position: int | None) -> bool:
        """Return whether it has computed a chunk itself."""
        if position is None:
            return False
        return position >= self._computes_from.get(key[-4:], position + 1)
