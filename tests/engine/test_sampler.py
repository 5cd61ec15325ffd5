"""Distributions, reproducibility and log probabilities of sampling."""

import math
from typing import Any

import pytest
import torch

from tieredkv.engine import sampler
from tieredkv.engine.engine_messages import TokenLogprob
from tieredkv.engine.sampler import SamplerState, sample, score
from tieredkv.engine.sampling_params import SamplingParams

VOCAB = 50
NUM_DRAWS = 4000


def state(drawn_seed: int = 1, **params: Any) -> SamplerState:
    return SamplerState(SamplingParams(**params), drawn_seed)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample_one(logits: torch.Tensor, row_state: SamplerState) -> int:
    return sample(logits[None], [row_state]).tokens()[0].token_id


def frequencies(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    states = [state(seed, **params) for seed in range(NUM_DRAWS)]
    tokens = sample(logits.expand(NUM_DRAWS, -1), states).tokens()
    return torch.bincount(torch.tensor([t.token_id for t in tokens]), minlength=logits.numel())


def assert_distributed(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Check draws by chi-square; they are seeded, so the result is always the same."""
    assert counts[expected == 0].sum() == 0
    likely = expected * NUM_DRAWS >= 5
    chi_square = (
        (counts - expected * NUM_DRAWS)[likely] ** 2 / (expected * NUM_DRAWS)[likely]
    ).sum()
    degrees = int(likely.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * max(1, degrees))


def test_greedy_takes_the_most_likely_token() -> None:
    logits = random_logits(8)
    tokens = sample(logits, [state(temperature=0.0) for _ in range(8)]).tokens()
    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(16)
    tokens = sample(logits, [state(seed, **params) for seed in range(16)]).tokens()
    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()


def test_tiny_temperatures_are_greedy_and_finite() -> None:
    logits = random_logits(4) * 1000
    tokens = sample(logits, [state(temperature=1e-5) for _ in range(4)]).tokens()
    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1)[0]
    expected = (logits / temperature).softmax(-1)
    assert_distributed(frequencies(logits, temperature=temperature), expected)


def test_top_k_draws_among_the_k_most_likely() -> None:
    logits = random_logits(1)[0]
    kept = logits.topk(5).indices
    expected = torch.zeros(VOCAB)
    expected[kept] = logits[kept].softmax(-1)
    assert_distributed(frequencies(logits, top_k=5), expected)


def test_top_p_draws_among_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03]).log()
    expected = torch.tensor([4 / 9, 3 / 9, 2 / 9, 0, 0])
    assert_distributed(frequencies(logits, top_p=0.75), expected)


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03]).log()
    expected = torch.tensor([4 / 7, 3 / 7, 0, 0, 0])  # of three, two reach 7/9 > 0.7
    assert_distributed(frequencies(logits, top_k=3, top_p=0.7), expected)


def test_min_p_drops_what_is_unlikely_beside_the_most_likely() -> None:
    logits = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    expected = torch.tensor([5 / 8, 3 / 8, 0, 0])
    assert_distributed(frequencies(logits, min_p=0.25), expected)


@pytest.mark.parametrize("params", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_a_seeded_request_is_the_same_in_any_batch(params: dict[str, Any]) -> None:
    steps = [random_logits(6, seed=step) for step in range(12)]
    alone, batched = state(9, **params), state(9, **params)
    mates = [state(n, top_k=n, temperature=n % 3 / 2) for n in range(5)]
    for logits in steps:
        expected = sample_one(logits[3], alone)
        tokens = sample(logits, [*mates[:3], batched, *mates[3:]]).tokens()
        assert tokens[3].token_id == expected


def test_large_batches_are_drawn_in_groups_without_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = random_logits(30)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.9, "frequency_penalty": 1.0}]

    def draw() -> list[int]:
        tokens = sample(logits, [state(i, **kinds[i % 3]) for i in range(30)]).tokens()
        return [token.token_id for token in tokens]

    expected = draw()
    monkeypatch.setattr(sampler, "_MAX_GROUP_NUMEL", 3 * VOCAB)
    assert draw() == expected


def test_each_row_is_adjusted_by_its_own_parameters() -> None:
    rows: list[dict[str, Any]] = [
        {"presence_penalty": 1.0, "logit_bias": {0: -0.5}},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 9, "stop_token_ids": (3, 4), "logit_bias": {3: 100.0}},
        {},
    ]

    def states() -> list[SamplerState]:
        made = [state(temperature=0.0, **params) for params in rows]
        for row_state in made:
            for token_id in (0, 2, 2):
                row_state.append(token_id)
        return made

    logits = random_logits(4, seed=3)
    together = sample(logits, states()).tokens()
    apart = [sample_one(line, one) for line, one in zip(logits, states(), strict=True)]
    assert [token.token_id for token in together] == apart
    assert apart[2] not in (3, 4)


def test_a_seeded_request_goes_on_as_it_was_after_a_preemption() -> None:
    steps = random_logits(10)
    whole = state(4)
    tokens = [sample_one(logits, whole) for logits in steps]
    resumed = state(4)
    for token in tokens[:6]:
        resumed.append(token)
        resumed.num_output_tokens += 1
    assert [sample_one(logits, resumed) for logits in steps[6:]] == tokens[6:]


def test_the_users_seed_counts_before_the_drawn_one() -> None:
    logits = random_logits(1)[0]
    answers = {sample_one(logits, state(drawn, seed=5)) for drawn in range(20)}
    assert len(answers) == 1
    assert len({sample_one(logits, state(drawn)) for drawn in range(20)}) > 1


def test_negative_seeds_are_seeds_too() -> None:
    logits = random_logits(1)[0]
    assert sample_one(logits, state(seed=0, top_k=40)) == sample_one(logits, state(0, top_k=40))
    assert state(-1).uniform() != state(1).uniform()


def test_presence_and_frequency_penalties_count_the_output() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    greedy = state(temperature=0.0, presence_penalty=0.2)
    assert [sample_one(logits[0], greedy) for _ in range(4)] == [0, 1, 0, 0]
    greedy = state(temperature=0.0, frequency_penalty=0.3)
    assert [sample_one(logits[0], greedy) for _ in range(5)] == [0, 1, 0, 1, 0]


def test_repetition_penalty_counts_the_prompt_too() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    fresh = SamplerState(params, 0, prompt_token_ids=[2])
    repeated = SamplerState(params, 0, prompt_token_ids=[0, 2])
    assert sample_one(logits, fresh) == 0
    assert sample_one(logits, repeated) == 1


def test_a_bias_moves_the_choice_and_not_the_reported_probability() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    biased = state(temperature=0.0, logit_bias={2: 10.0}, logprobs=1)
    token = sample(logits, [biased]).tokens()[0]
    assert token.token_id == 2
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 2]))
    assert token.top[0][0] == 0


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    row = SamplerState(params, 0, eos_token_ids={0})
    assert [sample_one(logits, row) for _ in range(3)] == [2, 2, 0]


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = random_logits(4)
    states = [state(i, logprobs=n, temperature=0.3) for i, n in enumerate((0, 3, 20))] + [state()]
    tokens = sample(logits, states).tokens()
    logprobs = logits.log_softmax(-1)
    for row, n in enumerate((0, 3, 20)):
        found = tokens[row]
        assert found.logprob == pytest.approx(float(logprobs[row, found.token_id]))
        values, ids = logprobs[row].topk(n)
        assert [i for i, _ in found.top] == ids.tolist()
        assert [p for _, p in found.top] == pytest.approx(values.tolist())
    assert tokens[3] == TokenLogprob(token_id=tokens[3].token_id, logprob=None)


def test_sampling_leaves_the_logits_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [state(logit_bias={1: 5.0}), state(top_k=3)]).tokens()
    assert torch.equal(logits, before)


def test_scoring_a_prompt_gives_each_tokens_probability() -> None:
    logits = random_logits(3)
    scored = score(logits, torch.tensor([4, 5, 6]), [2, 2, 2]).logprobs()
    expected = logits.log_softmax(-1)
    assert [t.logprob for t in scored] == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate((4, 5, 6))]
    )
    assert all(len(t.top) == 2 for t in scored)
