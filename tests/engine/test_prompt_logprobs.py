"""Log-probabilities of a prompt's own tokens, against a forward pass of the whole prompt."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.e2e.test_claims import serve
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.harness import reference_model
from tests.golden import refused
from tieredkv import LLM, SamplingParams
from tieredkv.engine.answer import Answer
from tieredkv.engine.tiny import init_tiny_weights
from tieredkv.errors import RequestError

TWO = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1)


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of what follows each token, `[num_tokens, vocab_size]`."""
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([ids])).logits[0]).log_softmax(-1)


def check(answer: Answer, ids: list[int], expected: torch.Tensor) -> None:
    first, *others = answer.logprobs[: len(ids)]
    assert len(answer.logprobs) == len(ids) + len(answer.token_ids)
    assert (first.token_id, first.logprob, first.top) == (ids[0], None, [])
    assert [token.token_id for token in others] == ids[1:]
    own = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    told = torch.tensor([token.logprob for token in others])
    torch.testing.assert_close(told, own, atol=2e-4, rtol=1e-4)
    for row, token in zip(expected, others, strict=False):
        values, top_ids = row.topk(3)
        assert [id for id, _ in token.top] == top_ids.tolist()
        torch.testing.assert_close(
            torch.tensor([value for _, value in token.top]), values, atol=2e-4, rtol=1e-4
        )
    assert answer.token_ids[0] == int(expected[-1].argmax())


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 400])
def test_each_token_of_a_prompt_is_scored_in_chunks(checkpoints: Any, num_tokens: int) -> None:
    folder: Path = checkpoints("llama")
    ids = random.Random(num_tokens).choices(range(10, VOCAB_SIZE), k=num_tokens)
    expected = reference(reference_model(folder), ids)
    with LLM(str(folder), device_size="4MiB", host_size="4MiB", dtype="float32") as llm:
        serve(llm, ids)  # cached blocks have no logits and are not used
        answer = serve(llm, ids, params=TWO, prompt_logprobs=3)
        check(answer, ids, expected)
        usage = answer.usage
        assert (usage.cached_tokens, usage.written_tokens, usage.miss_reason) == (0, 0, None)
        assert answer.token_ids == serve(llm, ids, params=TWO).token_ids


def test_the_small_model_scores_as_its_forward_pass_in_float32() -> None:
    sizes: dict[str, Any] = {"device_size": "4MiB", "host_size": "4MiB", "dtype": "float32"}
    with LLM("tiny-random", **sizes) as llm:
        ids = random.Random(1).choices(range(256), k=300)
        make: Any = LlamaForCausalLM
        model = make(llm.core.model.config).to(dtype=torch.float32).eval()
        model.set_attn_implementation("sdpa")
        init_tiny_weights(model)
        check(serve(llm, ids, params=TWO, prompt_logprobs=3), ids, reference(model, ids))


def test_scored_prompts_beside_others_and_after_a_preemption_are_the_same() -> None:
    sizes: dict[str, Any] = {"device_size": "1MiB", "host_size": "1MiB", "max_num_seqs": 4}
    prompts = [random.Random(seed).choices(range(256), k=150) for seed in range(4)]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with LLM("tiny-random", **sizes) as llm:
        alone = [serve(llm, ids, params=params, prompt_logprobs=0) for ids in prompts]
        counts = [i % 2 or None for i in range(len(prompts))]
        answers = llm.serve(
            [
                llm.make_request(ids, params, prompt_logprobs=count)
                for ids, count in zip(prompts, counts, strict=True)
            ]
        )
        stats: Any = llm.tier_stats()
        assert stats["counters"]["preemptions"]
    for expected, told in zip(alone, answers, strict=True):
        assert told.token_ids == expected.token_ids
        wanted = [it.logprob for it in expected.logprobs[1:]]
        got = [it.logprob for it in told.logprobs[1:]]
        assert got == pytest.approx(wanted, abs=1e-3) or not told.logprobs
    assert [bool(it.logprobs) for it in answers] == [False, True, False, True]


def test_a_prompt_as_long_as_the_context_is_computed_where_no_answer_is_wanted() -> None:
    ids = random.Random(1).choices(range(256), k=256)
    none = SamplingParams(max_tokens=0, temperature=0.0, logprobs=0)
    with LLM("tiny-random", device_size="512KiB", host_size="1MiB") as llm:
        assert llm.core.info.max_model_len == len(ids), "all of VRAM"
        cold, warm = serve(llm, ids, params=none), serve(llm, ids, params=none)
        for answer in (cold, warm):
            assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([], [], "length")
        assert (cold.usage.written_tokens, cold.usage.cached_tokens) == (256, 0)
        assert (warm.usage.cached_tokens, warm.usage.recomputed_tokens) == (255, 1)
        assert len(serve(llm, ids, params=none, prompt_logprobs=0).logprobs) == len(ids)
        with refused(RequestError, param="prompt", code="context_length_exceeded"):
            serve(llm, ids, params=TWO)
        with refused(RequestError, param="prompt", code="context_length_exceeded"):
            serve(llm, [*ids, 1], params=none)
        llm.core.scheduler.check()
