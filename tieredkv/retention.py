"""How long a block may be kept, and in which tiers: the contract of `prompt_cache_retention`.

This module knows policies and deadlines. It does not know clocks, tiers' contents or requests.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tieredkv.errors import ConfigError, invalid_value
from tieredkv.types import Tier
from tieredkv.units import format_duration

ALIASES = {"in-memory": "in_memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """One retention policy: how long, and in which tiers, it keeps a block.

    Attributes:
        idle_s: time after the last use at which a block becomes unreachable.
        absolute_s: time after the computation of its keys and values at which a block becomes
            unreachable, even if it is used or pinned.
        tiers: where a block may be kept if only this policy asked for it.
        is_public: whether `prompt_cache_retention` may name it. Other policies are for requests by
            other means, such as `cache_control`.
    """

    name: str
    idle_s: float
    absolute_s: float
    tiers: frozenset[Tier]
    is_public: bool = True

    def __post_init__(self) -> None:
        name, idle, absolute = f"retention.{self.name}", self.idle_s, self.absolute_s
        if self.name in ALIASES:
            other = f"retention.{ALIASES[self.name]}"
            raise ConfigError(f"`{name}` is another spelling of `{other}`; write `{other}`")
        for field, value in (("idle", idle), ("absolute", absolute)):
            if not 0 < value < math.inf:
                raise ConfigError(f"`{name}.{field}` = {value} must be above 0 s and finite")
        if idle > absolute:
            bound = f"`absolute` = {format_duration(absolute)}"
            raise ConfigError(f"`{name}.idle` = {format_duration(idle)} is longer than {bound}")
        if Tier.DEVICE not in self.tiers:
            raise ConfigError(f"`{name}.tiers` must include `device`")
        if Tier.DISK in self.tiers and Tier.HOST not in self.tiers:
            why = "blocks reach the disk through host memory"
            raise ConfigError(f"`{name}.tiers` includes `disk`, so it must include `host`: {why}")

    @property
    def may_use_disk(self) -> bool:
        """Whether blocks of this policy may be written to disk."""
        return Tier.DISK in self.tiers

    def deadline(self, computed_at: float, last_used: float, pinned_until: float = 0.0) -> float:
        """Return when a block that only this policy asked for becomes unreachable.

        A pin can keep the block beyond `idle_s`, but not beyond `absolute_s`.
        """
        return min(computed_at + self.absolute_s, max(last_used + self.idle_s, pinned_until))


_RAM = frozenset({Tier.DEVICE, Tier.HOST})
IN_MEMORY = RetentionPolicy(name="in_memory", idle_s=600.0, absolute_s=3600.0, tiers=_RAM)
TWENTY_FOUR_HOURS = RetentionPolicy(
    name="24h", idle_s=86400.0, absolute_s=86400.0, tiers=frozenset(Tier)
)
_TTLS = (
    RetentionPolicy(name=name, idle_s=idle_s, absolute_s=3600.0, tiers=_RAM, is_public=False)
    for name, idle_s in (("5m", 300.0), ("1h", 3600.0))
)
DEFAULT_POLICIES = (IN_MEMORY, TWENTY_FOUR_HOURS, *_TTLS)


class RetentionPolicies:
    """The policies that a server offers; requests choose among them and cannot make their own."""

    def __init__(self, policies: Iterable[RetentionPolicy] = DEFAULT_POLICIES) -> None:
        self._policies = {policy.name: policy for policy in policies}
        # Of the few sets of claims that there are.
        self._of_disk: dict[frozenset[str], list[RetentionPolicy]] = {}
        self._tiers: dict[frozenset[str], frozenset[Tier]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all policies."""
        return frozenset(self._policies)

    def get(self, name: str, *, is_strict: bool = False, is_any: bool = False) -> RetentionPolicy:
        """Return the policy of this name; `in-memory` is an alias of `in_memory`.

        Args:
            name: the name in a request.
            is_strict: whether the alias is refused.
            is_any: whether policies that are not public are accepted, too.

        Raises:
            RequestError: there is no such policy; the text is OpenAI's.
        """
        policy = self._policies.get(name if is_strict else ALIASES.get(name, name))
        if policy is None or not (policy.is_public or is_any):
            *rest, last = (f"'{each.name}'" for each in self._policies.values() if each.is_public)
            joint = " and " if len(rest) == 1 else ", and "
            supported = joint.join([", ".join(rest), last]) if rest else last
            raise invalid_value("prompt_cache_retention", name, supported)
        return policy

    def deadline(self, claims: Collection[str], *times: float) -> float:
        """Return when a block becomes unreachable, which is the latest deadline of its claims.

        Args:
            claims: names of policies.
            times: as `RetentionPolicy.deadline` takes them.
        """
        return max([self._policies[name].deadline(*times) for name in claims])

    def disk_deadline(self, claims: Collection[str], *times: float) -> float | None:
        """Return until when the disk may keep a block; None if no claim allows the disk."""
        claims = frozenset(claims)
        may = self._of_disk.get(claims)
        if may is None:
            policies = map(self._policies.__getitem__, claims)
            may = self._of_disk[claims] = [policy for policy in policies if policy.may_use_disk]
        return max([policy.deadline(*times) for policy in may], default=None)

    def without_disk(self, claims: frozenset[str]) -> frozenset[str]:
        """Return the claims that do not allow the disk, or all if each one does."""
        return frozenset(it for it in claims if not self._policies[it].may_use_disk) or claims

    def tiers(self, claims: frozenset[str]) -> frozenset[Tier]:
        """Return the tiers that a policy among the claims lets a block into."""
        found = self._tiers.get(claims)
        if found is None:
            policies = map(self._policies.__getitem__, claims)
            found = self._tiers[claims] = frozenset().union(*(each.tiers for each in policies))
        return found

    def longest(self, claims: Collection[str]) -> str:
        """Return the claim that keeps a block longest; claims that allow the disk come first."""

        def rank(name: str) -> tuple[bool, float, float, str]:
            policy = self._policies[name]
            return policy.may_use_disk, policy.absolute_s, policy.idle_s, name

        return max(claims, key=rank)

    def up_to(self, name: str | None) -> "RetentionPolicies":
        """Return the policies that keep a block neither longer nor in other tiers than this one."""
        most = self._policies[name] if name else None
        return RetentionPolicies(
            policy
            for policy in self._policies.values()
            if not most or (policy.absolute_s <= most.absolute_s and policy.tiers <= most.tiers)
        )
