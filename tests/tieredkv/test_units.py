from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.errors import ConfigError
from tieredkv.units import exact_bytes, format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 << 30),
        ("64MiB", 64 << 20),
        ("1GB", 10**9),
        ("2 tib", 2 << 40),
        ("1.5KiB", 1536),
        ("0.1KB", 100),
        ("10kB", 10_000),
        (" 512 B ", 512),
        ("4096", 4096),
        ("0", 0),
        (7, 7),
    ],
)
def test_a_size_is_read_as_written(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "4G",
        "4 Gib/s",
        "-1GiB",
        "1e9",
        "1,5GiB",
        "nan",
        "٣GiB",
        "9" * 5000,
        "1 GiB 2 MiB",
        -1,
        1.5,
        True,
        None,
        ["1GiB"],
    ],
)
def test_what_is_no_size_is_shown(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        (2**20 - 1, "1 MiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_a_size_is_shown_short(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**60))
def test_an_exact_size_is_read_back(num_bytes: int) -> None:
    assert parse_bytes(exact_bytes(num_bytes)) == num_bytes


def test_an_exact_size_uses_the_largest_unit_that_fits() -> None:
    assert exact_bytes(80 << 30) == "80GiB"
    assert exact_bytes(1536 << 10) == "1536KiB"
    assert exact_bytes(1000) == "1000"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20s", 20.0),
        ("10m", 600.0),
        ("24h", 86400.0),
        ("7d", 604800.0),
        ("500ms", 0.5),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("0.1s", 0.1),
        ("20", 20.0),
        ("2.5", 2.5),
        (30, 30.0),
        (0.25, 0.25),
    ],
)
def test_a_duration_is_read_as_written(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "s",
        "20x",
        "-5s",
        "1e3s",
        "inf",
        "nan",
        "1h30",
        "9" * 5000,
        -1,
        float("inf"),
        float("nan"),
        True,
        None,
    ],
)
def test_what_is_no_duration_is_shown(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (0.9996, "1s"),
        (1.5, "1.5s"),
        (9.96, "10s"),
        (59.9, "1m"),
        (90, "1m 30s"),
        (3600, "1h"),
        (3601, "1h"),
        (86400, "24h"),
        (86400 * 2.5, "2d 12h"),
        (7 * 86400, "7d"),
        (-90, "-1m 30s"),
    ],
)
def test_a_duration_is_shown_in_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0.001, 1e7))
def test_a_shown_duration_is_read_back_to_within_its_last_unit(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.1, abs=0.001)
