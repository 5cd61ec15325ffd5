"""What is counted of a step by those who time it and those who predict its time."""

NEW_SHARE = 0.25
"""Share of the last step in the mean of its kind."""


def pairs(begin: int, end: int) -> float:
    """Return how many pairs of a token in `[begin, end)` and a token before it there are."""
    return (end * end - begin * begin) / 2


def smoothed(mean: float, new: float) -> float:
    """Return the mean of steps with one more; it follows the last ones, and 0.0 is none."""
    return mean + NEW_SHARE * (new - mean) if mean else new
