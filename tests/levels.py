"""Which cases of a test run when; `tests/conftest.py` has the rule for whole folders."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], number: int = 1) -> list[Any]:
    """Return the first cases, and the others as slow ones, for `make test-full`.

    Args:
        cases: the values of one argument, or tuples of those of several.
        number: how many run in every run.
    """
    each = [pytest.param(*case) if isinstance(case, tuple) else case for case in cases]
    slow = (
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in [*cases][number:]
    )
    return [*each[:number], *slow]
