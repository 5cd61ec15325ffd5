"""Looking up a prompt of a model with states or windows finds what it finds of another model."""

from tests.stress.lookup_cost import PLACES, measure


def test_a_prompt_is_found_wherever_it_is_and_whatever_the_disk_has_told() -> None:
    rows = [*measure("random:qwen3.6-35b-a3b-fp8", 4097, 64, 1)]
    found = {(row["place"], row["has_told"]): row["num_found"] for row in rows}
    assert found == {(it, told): 64 * (it != PLACES[0]) for it in PLACES for told in (True, False)}
    assert all(row["us"] > 0 for row in rows)
