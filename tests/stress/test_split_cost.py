"""A plan asks for the time of hardly more parts of a prompt that is sixteen times as long."""

import pytest

from tests.stress.split_cost import CASES, demand, num_calls


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_plan_does_not_walk_a_request_wherever_its_blocks_lie(case: str, is_begun: bool) -> None:
    short, long = (num_calls(demand(case, it, is_begun=is_begun)) for it in (4096, 65_536))
    assert 0 < long <= min(80, short + 40)
