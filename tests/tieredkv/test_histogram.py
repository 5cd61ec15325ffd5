"""Histograms in buckets of equal ratios."""

import random

import pytest

from tieredkv.histogram import LogHistogram


def test_quantiles_are_told_to_within_a_twentieth() -> None:
    source, histogram = random.Random(0), LogHistogram()
    numbers = sorted(source.lognormvariate(0, 3) for _ in range(10_000))
    for number in numbers:
        histogram.add(number)
    assert histogram.num == 10_000
    for share in (0.01, 0.5, 0.9, 0.99):
        wanted = numbers[int(share * 10_000) - 1]
        assert histogram.quantile(share) == pytest.approx(wanted, rel=0.05)


def test_a_sum_has_the_numbers_of_all_and_changes_none() -> None:
    one, other = LogHistogram(), LogHistogram()
    one.add(1.0)
    other.add(1.0)
    other.add(100.0)
    both = LogHistogram.sum([one, other])
    assert (both.num, one.num, other.num) == (3, 1, 2)
    assert both.quantile(1.0) == pytest.approx(100, rel=0.05)
    assert LogHistogram.sum([]).quantile(0.5) is None


@pytest.mark.parametrize("number", [-1.0, 0.0, 1e-300, 1e300])
def test_any_number_has_a_bucket(number: float) -> None:
    histogram = LogHistogram()
    histogram.add(number)
    assert histogram.num == 1
    assert histogram.quantile(0.5) == pytest.approx(1.6e-5 if number < 1 else 3.5e7, rel=0.05)
