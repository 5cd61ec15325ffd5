import pytest

from tieredkv.errors import (
    ConfigError,
    CorruptBlockError,
    StorageError,
    StoreBusyError,
    TieredKVError,
)
from tieredkv.wire.process import Refused


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("`a` is no size"), ConfigError),
        (StoreBusyError("in use"), StoreBusyError),
        (CorruptBlockError("a page is torn", reason="checksum"), StorageError),
    ],
    ids=str,
)
def test_an_error_is_raised_in_the_other_process_as_it_was_in_the_first(
    error: TieredKVError, kind: type[TieredKVError]
) -> None:
    found = Refused.of(error).error
    assert (type(found), str(found)) == (kind, str(error))


@pytest.mark.parametrize("kind", ["OSError", "ModuleNotFoundError", "named", "NoSuchError"])
def test_a_kind_that_is_no_error_of_ours_is_a_plain_one(kind: str) -> None:
    found = Refused(kind, "text").error
    assert (type(found), str(found)) == (TieredKVError, "text")
