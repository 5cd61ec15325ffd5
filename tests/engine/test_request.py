"""A request reports which tiers its prompt came from."""

from tieredkv.cache.prefix import Prefix
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.types import BlockHash, Tier

SIZE = 16
HASHES = [BlockHash(bytes([index]) * 32) for index in range(4)]


def why_missed(_prefix: Prefix, index: int) -> str:
    return f"block {index}"


def make_request(num_prompt_tokens: int, sources: list[Tier | None]) -> Request:
    params = SamplingParams()
    prefix = Prefix(BlockHash(b"root"), b"ns", HASHES[: len(sources)], [], sources=sources)
    return Request(
        EngineRequest(request_id="r", prompt_token_ids=[1] * num_prompt_tokens, params=params),
        prefix=prefix,
        sampler=SamplerState(params, 0),
        max_output_tokens=params.max_tokens,
    )


def test_tokens_are_counted_by_the_tier_that_had_them() -> None:
    request = make_request(70, [Tier.DEVICE, Tier.HOST, Tier.DISK, None])
    usage = request.measure_usage(SIZE, 0, why_missed)
    assert usage.cached_tokens_by_tier == dict.fromkeys(Tier, 16)
    assert (usage.cached_tokens, usage.written_tokens) == (48, 16)
    assert (usage.miss_token, usage.miss_reason) == (48, "block 3")


def test_the_last_token_of_a_wholly_cached_prompt_is_not_counted_as_cached() -> None:
    usage = make_request(64, [Tier.DISK] * 4).measure_usage(SIZE, 1, why_missed)
    assert usage.cached_tokens_by_tier[Tier.DISK] == usage.cached_tokens == 63
    assert (usage.written_tokens, usage.miss_reason) == (0, None)


def test_a_block_that_generated_tokens_fill_is_no_part_of_the_prompt() -> None:
    usage = make_request(40, [Tier.DEVICE] * 3).measure_usage(SIZE, 0, why_missed)
    assert (usage.cached_tokens, usage.written_tokens) == (32, 0)


def test_blocks_that_a_request_computed_before_its_preemption_are_no_hit() -> None:
    request = make_request(64, [Tier.DISK, Tier.DEVICE, Tier.DEVICE, None])
    request.own_hashes = {HASHES[1], HASHES[2]}
    usage = request.measure_usage(SIZE, 0, why_missed)
    assert usage.cached_tokens_by_tier == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 16}
    assert usage.written_tokens == 48
