"""A request reports which tiers its prompt came from."""

from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain
from tieredkv.cache.row import State
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.types import BlockHash, Tier

SIZE = 16
HASHES = [BlockHash(bytes([index]) * 32) for index in range(4)]


def why_missed(_prefix: Chain, index: int) -> str:
    return f"block {index}"


def computed_sooner(prefix: Chain, index: int) -> str:
    return prefix.row.why_computed.get(index, "never_seen")


def make_request(num_prompt_tokens: int, sources: list[Tier | None]) -> Request:
    params = SamplingParams()
    blocks = [Block(index, source=source) for index, source in enumerate(sources)]
    prefix = Chain(BlockHash(b"root"), b"ns", HASHES[: len(sources)], [], blocks=blocks)
    for index, source in enumerate(sources):
        prefix.row.find(index, State.COMPUTED if source is None else State.COMING)
    return Request(
        EngineRequest(request_id="r", prompt_token_ids=[1] * num_prompt_tokens, params=params),
        chain=prefix,
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


def test_tokens_that_were_computed_although_the_disk_had_them_are_not_counted_as_cached() -> None:
    request = make_request(80, [None, None, Tier.DISK, None])
    request.chain.row.why_computed = dict.fromkeys([0, 1], "computed_sooner")
    usage = request.measure_usage(SIZE, 0, computed_sooner)
    assert (usage.cached_tokens, usage.recomputed_tokens, usage.written_tokens) == (16, 32, 16)
    assert usage.split_token == 32
    assert (usage.miss_token, usage.miss_reason) == (48, "never_seen")


def test_where_all_was_found_the_reason_of_the_miss_is_that_computing_was_faster() -> None:
    request = make_request(70, [Tier.DEVICE, None, None, Tier.HOST])
    request.chain.row.why_computed = dict.fromkeys([1, 2], "computed_sooner")
    usage = request.measure_usage(SIZE, 0, computed_sooner)
    assert (usage.cached_tokens, usage.recomputed_tokens, usage.written_tokens) == (32, 32, 0)
    assert (usage.miss_token, usage.miss_reason) == (16, "computed_sooner")
    assert usage.split_token == 48


def test_a_block_whose_load_failed_is_a_miss_and_not_a_choice() -> None:
    request = make_request(70, [None, Tier.DISK, Tier.DISK, Tier.DISK])
    request.chain.row.why_computed = {0: "corrupt"}
    usage = request.measure_usage(SIZE, 0, why_missed)
    assert (usage.recomputed_tokens, usage.written_tokens) == (0, 16)
    assert (usage.miss_token, usage.miss_reason) == (0, "block 0")
    assert usage.split_token == 16


def test_a_request_that_loads_nothing_has_no_split_and_no_prediction() -> None:
    request = make_request(70, [Tier.DEVICE, Tier.DEVICE, None, None])
    request.usage = request.measure_usage(SIZE, 0, why_missed)
    request.note_first_token(None)
    assert request.usage.split_token is request.usage.predicted_s is None
    assert request.usage.actual_s is None


def test_the_predicted_time_of_the_first_token_is_told_beside_the_real_one() -> None:
    request = make_request(70, [Tier.DISK] * 4)
    request.usage = request.measure_usage(SIZE, 0, why_missed)
    request.note_first_token((1.5, 2.5, "restored"))
    assert request.usage.predicted_s == 1.5
    assert request.usage.actual_s == 2.5
    assert request.usage.forecast_kind == "restored"
