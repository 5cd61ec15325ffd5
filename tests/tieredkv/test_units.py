"""Sizes and durations as people write them, read and printed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import refused
from tieredkv.errors import ConfigError
from tieredkv.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("512B", 512),
        ("1k", 1024),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        ("64M", 64 << 20),
        ("80GiB", 80 << 30),
        ("80 GiB", 80 << 30),
        ("  80GiB ", 80 << 30),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("1KB", 1000),
        ("1MB", 10**6),
        ("1GB", 10**9),
        ("1.5TB", 15 * 10**11),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "GiB",
        "1 2",
        "1e3",
        "-1",
        "+1",
        "1,5GiB",
        "1.GiB",
        ".5GiB",
        "1XB",
        "10s",
        "inf",
        "nan",
        "1_000",
        "٣GiB",
        True,
        False,
        None,
        1.5,
        [1],
        b"1",
    ],
)
def test_what_is_not_a_size_is_refused_by_its_value(value: Any) -> None:
    with refused(ConfigError):
        parse_bytes(value)


@given(st.integers(0, 2**70))
def test_a_number_of_bytes_survives_being_written_as_text(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(1, 1023), st.sampled_from([0, 10, 20, 30, 40]))
def test_a_formatted_size_can_be_read_back(count: int, shift: int) -> None:
    assert parse_bytes(format_bytes(count << shift)) == count << shift


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2 << 20, "2 MiB"),
        (10**9, "953.7 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1 TiB"),
        (1 << 50, "1024 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_a_size_is_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (30, 30.0),
        (0.25, 0.25),
        ("30", 30.0),
        ("250ms", 0.25),
        ("90s", 90.0),
        ("90 s", 90.0),
        ("1.5m", 90.0),
        ("15M", 900.0),
        ("24h", 86400.0),
        ("7d", 604800.0),
        ("1w", 604800.0),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "h",
        "1h30m",
        "-5s",
        "1e3",
        "5 minutes",
        "10MiB",
        "1_0s",
        "٣s",
        "9" * 400,
        "inf",
        "nan",
        float("inf"),
        float("nan"),
        True,
        None,
        [1],
        b"1s",
    ],
)
def test_what_is_not_a_duration_is_refused_by_its_value(value: Any) -> None:
    with refused(ConfigError):
        parse_duration(value)


@given(st.integers(0, 1000), st.sampled_from("smhdw"))
def test_a_duration_is_its_count_times_its_unit(count: int, unit: str) -> None:
    sizes = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    assert parse_duration(f"{count}{unit}") == count * sizes[unit]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "0.25s"),
        (1.5, "1.5s"),
        (59, "59s"),
        (59.7, "1m"),
        (60, "1m"),
        (90, "1m 30s"),
        (600, "10m"),
        (3600, "1h"),
        (3661, "1h 1m"),
        (86399, "23h 59m"),
        (86400, "1d"),
        (100800, "1d 4h"),
        (604800, "7d"),
    ],
)
def test_a_duration_is_written_as_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0.001, 59.4) | st.integers(0, 1000).map(lambda hours: hours * 3600.0))
def test_a_formatted_duration_reads_back_to_three_digits(seconds: float) -> None:
    parts = format_duration(seconds).split()
    assert sum(map(parse_duration, parts)) == pytest.approx(seconds, rel=0.005)
