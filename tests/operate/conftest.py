"""The stores that the tests of `tests/storage` serve."""

from tests.storage.conftest import harness as harness
