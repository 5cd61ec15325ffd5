"""Tenants that send quick requests beside the long prompts of others, and how steps wait for them.

A new request waits for the step in progress. So steps are short for SHORT_STEPS_S after a quick
request is admitted, while another tenant has prompts to compute.

`python -m tests.stress.flood` measures the gain of the one tenant and the cost to the other.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

SHORT_STEPS_S = 10.0

RETURN_S = 0.01
"""A tenant that asked again within this time is given as long after its next answer.

Long prompts resume only then; otherwise each request of the tenant would find a step in progress.
Beside such a request, long prompts get three quarters of a short step.
Source: anticipatory scheduling, Iyer and Druschel 2001.
"""


@dataclass(slots=True)
class _QuickTenant:
    """When a tenant's last quick request was admitted and ended; 0 once it has asked again."""

    admitted_at: float = 0.0
    ended_at: float = 0.0
    returns_soon: bool = False


class QuickTenants:
    """Notes quick requests, and says how steps have to be made for the next ones.

    Attributes:
        has_short_steps: whether steps are short, as of the last `look`.
        held_until: when long prompts resume, see `RETURN_S`; 0 if they are not held.
    """

    def __init__(self) -> None:
        self._tenants: defaultdict[str, _QuickTenant] = defaultdict(_QuickTenant)
        self.has_short_steps = False
        self.held_until = 0.0

    def note_asked(self, tenant: str) -> None:
        """Note that a tenant has sent a request."""
        one = self._tenants.get(tenant)
        if one is not None and one.ended_at:
            one.returns_soon = time.monotonic() - one.ended_at <= RETURN_S
            one.ended_at = 0.0

    def note_admitted(self, tenant: str) -> None:
        """Note that a quick request of a tenant is admitted."""
        self._tenants[tenant].admitted_at = time.monotonic()

    def note_ended(self, tenant: str) -> None:
        """Note that a quick request of a tenant has ended."""
        self._tenants[tenant].ended_at = time.monotonic()

    def look(self, tenants: set[str], *, has_come: bool) -> None:
        """Update `has_short_steps`, and `held_until` while a quick tenant may soon ask again."""
        now = time.monotonic()
        for tenant, one in list(self._tenants.items()):
            if now - one.admitted_at >= SHORT_STEPS_S:
                del self._tenants[tenant]
        quick = [one for tenant, one in self._tenants.items() if tenants - {tenant}]
        self.has_short_steps = bool(quick)
        returning = [] if has_come else [it for it in quick if it.ended_at and it.returns_soon]
        held_until = max((it.ended_at + RETURN_S for it in returning), default=0.0)
        self.held_until = held_until if held_until > now else 0.0
