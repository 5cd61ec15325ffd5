"""Plans as text: what each followed from, and what was decided.

With `--log-level debug` the engine logs each plan as a line of JSON. `replay` makes a logged plan
again, on any machine, so that a decision can be explained or compared with another planner's.
"""

from collections.abc import Sequence

import msgspec

from tieredkv.cache.plan import Demand, LinkState, Planner, Split
from tieredkv.cache.step_times import PromptTimes, StepTimes


class LoggedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan follows from, and the plan.

    Attributes:
        links: see `Planner`, as are the following ones up to `is_cpu`.
        times: how long steps take.
        chunk: the most tokens of a step.
        num_read: tokens that each step reads for requests that are generating.
        demands: what the requests need, in the order of service.
        splits: how they are divided; empty before the plan is made.
    """

    links: list[LinkState]
    block_size: int
    busy_s: float
    least_tokens: int
    is_cpu: bool = False
    times: StepTimes
    chunk: int
    num_read: float
    demands: list[Demand]
    splits: list[Split] = []

    def __str__(self) -> str:
        return msgspec.json.encode(self, enc_hook=_as_list).decode()


def before(planner: Planner, demands: Sequence[Demand]) -> LoggedPlan:
    """Return what the plan for these requests follows from; call it before the plan is made."""
    return LoggedPlan(
        links=list(planner.links),
        block_size=planner.block_size,
        busy_s=planner.busy_s,
        least_tokens=planner.least_tokens,
        is_cpu=planner.is_cpu,
        times=planner.compute.times,
        chunk=planner.compute.chunk,
        num_read=planner.compute.num_read,
        demands=list(demands),
    )


def replay(text: str) -> tuple[LoggedPlan, list[Split]]:
    """Make a logged plan again.

    Args:
        text: the JSON of the line.

    Returns:
        What was logged, and how the planner divides the requests now.

    Raises:
        ValueError: the text is no logged plan.
    """
    logged = msgspec.json.decode(text, type=LoggedPlan)
    planner = Planner(
        logged.links,
        PromptTimes(logged.times, logged.chunk, logged.num_read),
        block_size=logged.block_size,
        busy_s=logged.busy_s,
        least_tokens=logged.least_tokens,
        is_cpu=logged.is_cpu,
    )
    return logged, [planner.split(demand) for demand in logged.demands]


def _as_list(value: object) -> object:
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(type(value))
