"""Settings of all tests from end to end, unless they say otherwise."""

from collections.abc import Iterator

import pytest

from tests.folder_tier import FOLDER
from tests.waiting import HANG_S
from tieredkv.cache import demotion, lookups, room
from tieredkv.engine import parts


@pytest.fixture(scope="module", autouse=True)
def everything_is_loaded() -> Iterator[None]:
    """Load what is cached, so that no count of cached tokens depends on the speed of the machine.

    A test of the planner asks for `restore = "auto"` itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDKV_RESTORE", "load")
        yield


@pytest.fixture(params=["disk", "folder"])
def any_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the disk, and again with the toy of another tier."""
    if request.param == "folder":
        monkeypatch.setattr(parts, "TIER", FOLDER)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the disk however busy the machine is: what comes too late is a miss, or dropped."""
    monkeypatch.setattr(lookups, "LOOKUP_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(room, "PATIENCE_S", HANG_S)
    monkeypatch.setattr(demotion, "MAX_LATE", 1.0)
