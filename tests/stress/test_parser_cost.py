"""The measurement of parsing covers each family that writes calls, and checks what comes out."""

import pytest

from tests.stress.parser_cost import KINDS, measure
from tieredkv.server.message_parser import Family, families


@pytest.mark.parametrize(
    "family", [it for it in families().values() if it.call], ids=lambda it: it.name
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_is_parsed(family: Family, kind: str) -> None:
    row = measure(family, kind, 200, repeats=1)
    assert (row["family"], row["text"]) == (family.name, kind)
    assert 60 <= row["tokens"] <= 240
    assert row["us_per_token"] > 0
