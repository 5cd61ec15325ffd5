"""How long a block may be kept, and in which tiers.

Knows policies, claims and deadlines. A claim is the name of a policy that a request of the block's
namespace asked for. Does not know blocks, nor the clock: every time is handed in.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tieredkv.errors import ConfigError, RequestError
from tieredkv.types import Tier

_ALIASES = {"in-memory": "in_memory"}
_TIER_ORDER = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """One value of `prompt_cache_retention`.

    Attributes:
        name: what a request says.
        idle_s: kept at most this long after it was last used.
        absolute_s: kept at most this long after it was computed, used or not.
        tiers: where copies may be; a tier includes those above it, for bytes pass through them.
    """

    name: str
    idle_s: float
    absolute_s: float
    tiers: frozenset[Tier]

    def __post_init__(self) -> None:
        for field, value in (("idle", self.idle_s), ("absolute", self.absolute_s)):
            if not 0 < value < float("inf"):
                raise ConfigError(
                    f"`retention.{self.name}.{field}` is {value!r}; allowed: more than 0 seconds"
                )
        if self.tiers not in [frozenset(_TIER_ORDER[:n]) for n in (1, 2, 3)]:
            raise ConfigError(
                f"`retention.{self.name}.tiers` is {[*map(str, self.sorted_tiers)]}; "
                "allowed: ['device'], ['device', 'host'] or ['device', 'host', 'disk']"
            )

    @property
    def sorted_tiers(self) -> tuple[Tier, ...]:
        """The tiers, fastest first."""
        return tuple(tier for tier in _TIER_ORDER if tier in self.tiers)

    def deadline(self, computed_at: float, last_used: float) -> float:
        """Return the moment from which a block claimed by this policy alone is expired."""
        return min(computed_at + self.absolute_s, last_used + self.idle_s)


class RetentionPolicies:
    """The policies that requests may choose among, by name, in the order they were configured."""

    def __init__(self, policies: Iterable[RetentionPolicy]) -> None:
        self._policies = {policy.name: policy for policy in policies}
        self._disk_policies = {
            name: policy for name, policy in self._policies.items() if Tier.DISK in policy.tiers
        }

    @classmethod
    def default(cls) -> "RetentionPolicies":
        """Return `in_memory` (10 minutes idle, 1 hour) and `24h` (24 hours, disk too)."""
        return cls(
            [
                RetentionPolicy("in_memory", 600.0, 3600.0, frozenset({Tier.DEVICE, Tier.HOST})),
                RetentionPolicy("24h", 86400.0, 86400.0, frozenset(Tier)),
            ]
        )

    def __iter__(self) -> Iterator[RetentionPolicy]:
        return iter(self._policies.values())

    def __len__(self) -> int:
        return len(self._policies)

    def __contains__(self, name: object) -> bool:
        return name in self._policies

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetentionPolicies) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"RetentionPolicies({list(self)!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may say."""
        return tuple(self._policies)

    def get(self, name: str) -> RetentionPolicy:
        """Return the policy that a request names; its `name` is the canonical spelling.

        Raises:
            RequestError: no such policy, in the words of OpenAI's API.
        """
        policy = self._policies.get(_ALIASES.get(name, name) if isinstance(name, str) else "")
        if policy is None:
            raise RequestError(
                f"Invalid value: '{name}'. Supported values are: {_enumerate(self.names)}.",
                param="prompt_cache_retention",
                code="invalid_value",
            )
        return policy

    def deadline(self, claims: AbstractSet[str], computed_at: float, last_used: float) -> float:
        """Return the moment from which the block is unreachable: the longest of its claims.

        A claim of a policy that is not configured any more counts for nothing; a block without a
        claim that counts was expired when it was computed.
        """
        return _latest(self._policies, claims, computed_at, last_used)

    def disk_deadline(
        self, claims: AbstractSet[str], computed_at: float, last_used: float
    ) -> float | None:
        """Return `deadline` by the claims that allow disk; None where the disk is forbidden."""
        if self._disk_policies.keys().isdisjoint(claims):
            return None
        return _latest(self._disk_policies, claims, computed_at, last_used)

    def longest(self, claims: AbstractSet[str]) -> str:
        """Return the name of the claim that keeps a block longest, in the most tiers.

        Raises:
            ValueError: no claim is of a configured policy.
        """
        known = [self._policies[name] for name in claims if name in self._policies]
        return max(known, key=lambda p: (p.absolute_s, p.idle_s, len(p.tiers), p.name)).name


def _latest(
    policies: Mapping[str, RetentionPolicy],
    claims: AbstractSet[str],
    computed_at: float,
    last_used: float,
) -> float:
    # A lookup asks this of thousands of blocks: a plain loop, no objects made.
    latest = computed_at
    for name in claims:
        policy = policies.get(name)
        if policy is not None:
            deadline = policy.deadline(computed_at, last_used)
            if deadline > latest:
                latest = deadline
    return latest


def _enumerate(names: Iterable[str]) -> str:
    """Return `'a'`, `'a' and 'b'` or `'a', 'b', and 'c'`."""
    quoted = [f"'{name}'" for name in names]
    if len(quoted) < 3:
        return " and ".join(quoted)
    return ", ".join(quoted[:-1]) + f", and {quoted[-1]}"
