"""An allocation calls no more functions when more tenants have floors."""

import pytest

from tests.stress.allocation_cost import BAR, CASES, measure


@pytest.mark.parametrize("case", CASES)
def test_an_allocation_does_not_cost_more_for_a_thousand_tenants(case: str) -> None:
    few, many = (measure(case, tenants, repeats=1)["calls"] for tenants in (2, 1000))
    assert 0 < many <= BAR * few
