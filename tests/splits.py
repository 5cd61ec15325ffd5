"""Has the planner choose any split, so that tests meet divisions that no measured rate leads to."""

import random

import pytest

from tieredkv.cache.plan import Demand, Planner, Split


def choose_any_splits(patch: pytest.MonkeyPatch) -> random.Random:
    """Have each plan choose any split, whatever it costs; return what the choice depends on."""
    generator, best = random.Random(), Planner.split

    def split(planner: Planner, demand: Demand) -> Split:
        first = -(-demand.begin // planner.block_size)
        last = max([first, *(load.end for load in demand.loads)])
        block = generator.choice([first, last, generator.randint(first, last)])
        steady = generator.choice([first, block, generator.randint(first, block)])
        return best(planner, demand)._replace(block=block, steady_block=steady)

    patch.setattr(Planner, "split", split)
    return generator
