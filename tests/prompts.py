"""Prompts for the demo model."""

import random


def prompt(seed: int, num_tokens: int = 500) -> list[int]:
    """Return random tokens of the demo model's vocabulary."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(num_tokens)]
