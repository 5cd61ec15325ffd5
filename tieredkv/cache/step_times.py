"""How long steps, and the tokens of a prompt, take on a device whose coefficients are known."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.cache.stretches import Ints
from tieredkv.steps import pairs

FEW_TOKENS = 64
"""A step of fewer prompt tokens takes as long as the device needs for any step."""


class Step(NamedTuple):
    """A step that was measured; see `ComputeRate.learn`."""

    num_tokens: float
    num_pairs: float
    seconds: float
    num_read: float = 0.0

    @property
    def has_few(self) -> bool:
        """Whether it has so few tokens of prompts that their number does not matter."""
        return self.num_tokens < FEW_TOKENS

    @property
    def kind(self) -> tuple[int, int, int]:
        """Its size and its position, and what is generated beside it, roughly."""
        num_read = int(self.num_read).bit_length()
        if self.has_few:
            return 0, 0, num_read
        size, position = int(self.num_tokens), int(self.num_pairs / self.num_tokens)
        return size.bit_length(), position.bit_length(), num_read


class StepTimes(NamedTuple):
    """How long steps take: `max(least_s, a + b * tokens) + c * pairs + d * read`, in seconds."""

    a: float
    b: float
    c: float
    d: float
    least_s: float

    def step_seconds(self, num_tokens: float, num_pairs: float, num_read: float = 0.0) -> float:
        """Return how long a step takes."""
        a, b, c, d, least_s = self
        is_least = num_tokens < FEW_TOKENS and least_s > 0
        tokens_s = least_s if is_least else max(least_s, a + b * num_tokens)
        return tokens_s + c * num_pairs + d * num_read


@dataclass(slots=True)
class PromptTimes:
    """How long it takes to compute tokens `[begin, end)` of one prompt, in seconds.

    Attributes:
        times: of steps.
        chunk: the most tokens of one step.
        num_read: tokens that each step reads for requests that are generating.
    """

    times: StepTimes
    chunk: int
    num_read: float = 0.0
    _full_s: float = field(init=False)  # of a step that is full

    def __post_init__(self) -> None:
        self._full_s = self.times.step_seconds(self.chunk, 0.0, self.num_read)

    def __call__(self, begin: int, end: int) -> float:
        """Return how many seconds these tokens take."""
        if end <= begin:
            return 0.0
        num_full, rest = divmod(end - begin, self.chunk)
        seconds = num_full * self._full_s
        if rest:
            seconds += self.times.step_seconds(rest, 0.0, self.num_read)
        return seconds + self.times.c * pairs(begin, end)

    def each(self, begins: Ints, ends: Ints) -> NDArray[np.float64]:
        """Return the same for many parts `[begins[i], ends[i])`, none of which is empty."""
        times, num_tokens = self.times, ends - begins
        num_full, rest = np.divmod(num_tokens, self.chunk)
        rest_s = np.maximum(times.least_s, times.a + times.b * rest)
        if times.least_s > 0:
            rest_s[rest < FEW_TOKENS] = times.least_s
        rest_s = (rest > 0) * (rest_s + times.d * self.num_read)
        return num_full * self._full_s + rest_s + times.c * (num_tokens * (ends + begins) / 2)
