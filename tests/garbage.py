"""Spares tests the search for garbage with which an engine starts.

It looks through all that the tests have imported, which takes half a second. An engine in a process
of its own still does it, so the tests of servers run it.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_search_for_garbage() -> Iterator[None]:
    """Leave garbage collection of the tests' process as `tests/conftest.py` has set it up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tieredkv.engine.core.gc", SimpleNamespace(collect=lambda: None))
        patch.setattr("tieredkv.engine.core.look_seldom", lambda: lambda: None)
        yield
