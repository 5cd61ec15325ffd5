"""Models with recurrent states go on from their places with the tokens of cold prompts."""

import importlib.metadata
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tests.engine.test_weights import change_config
from tests.golden import refused
from tests.levels import few
from tieredkv import LLM, SamplingParams
from tieredkv.cache.presence import Presence
from tieredkv.cache.state_tail import StateTail
from tieredkv.engine import loader
from tieredkv.engine.engine_messages import TokenOutput
from tieredkv.engine.loader import find_model
from tieredkv.engine.runner import ModelRunner
from tieredkv.engine.step_buffers import BatchRow, StepOutput
from tieredkv.errors import ConfigError, ModelError
from tieredkv.hashing import chain_hashes
from tieredkv.types import STATE_GRID_TOKENS, BlockHash, Tier

GRID = STATE_GRID_TOKENS
Write = Callable[..., Path]


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 256), k=n)


@pytest.fixture(scope="module", name="write")
def write_fixture(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return what writes a checkpoint of a family once, with some fields changed."""
    written = dict[str, Path]()

    def write(name: str = "qwen3_5", **changes: Any) -> Path:
        key = f"{name} {changes}"
        if key not in written:
            written[key] = tmp_path_factory.mktemp("model")
            model_type, told = FAMILIES[name]
            config = make_config(model_type, told | {"max_position_embeddings": 1024} | changes)
            write_checkpoint(written[key], config)
        return written[key]

    return write


def open_llm(folder: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"device_size": "8MiB", "host_size": "8MiB", "block_size": 16}
    return LLM(str(folder), device="cpu", **(sizes | options))


def generate(llm: LLM, prompt: list[int], n: int = 6, **asked: Any) -> tuple[list[int], int]:
    """Answer a prompt; return the answer's tokens, and how many of the prompt were found."""
    params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
    [answer] = llm.generate([prompt], params, **asked)
    llm.core.cache.check()
    return answer.token_ids, answer.usage.cached_tokens


def cold(llm: LLM, prompt: list[int], n: int = 6) -> list[int]:
    """Answer a prompt of which nothing is found."""
    answer, num_found = generate(llm, prompt, n, cache_salt=str(time.monotonic()))
    assert not num_found
    return answer


@pytest.mark.parametrize("block_size", few([16, 64, 128, 32], 2))
def test_a_prompt_of_any_length_is_found_but_for_two_cells(write: Write, block_size: int) -> None:
    cell = max(GRID, block_size)
    with open_llm(write(), block_size=block_size) as llm:
        for length in (1, 63, 64, 65, 127, 128, 129, 150, 191, 192, 193, 300):
            prompt = tokens(length, seed=length)
            first, _ = generate(llm, prompt)
            again, num_found = generate(llm, prompt)
            assert again == first
            assert num_found % cell == 0 and length - 2 * cell <= num_found < length, length
            longer = prompt + first + tokens(9, seed=0)
            answer, num_found = generate(llm, longer)
            assert num_found >= length - cell, length
            assert answer == cold(llm, longer)


@pytest.mark.parametrize(
    ("num_shared", "length", "expected"),
    [
        (0, 150, [150]),
        (0, 700, [640, 60]),
        (300, 390, [390 - 256]),
        (150, 700, [640 - 128, 60]),
        (610, 660, [660 - 576]),
    ],
)
def test_a_step_passes_places_near_the_end_of_a_prompt_and_keeps_their_states(
    write: Write, monkeypatch: pytest.MonkeyPatch, num_shared: int, length: int, expected: list[int]
) -> None:
    prompt, steps = tokens(length, seed=12), list[int]()
    execute = ModelRunner.execute

    def note(self: ModelRunner, rows: Sequence[BatchRow], *rest: Any) -> StepOutput:
        steps.append(sum(len(row.token_ids) for row in rows))
        return execute(self, rows, *rest)

    monkeypatch.setattr(ModelRunner, "execute", note)
    with open_llm(write()) as llm:
        if num_shared:
            generate(llm, prompt[:num_shared], 1)
        steps.clear()
        generate(llm, prompt, 1)
        assert steps == expected
        last = length // GRID * GRID
        for end in (last, last - GRID):
            turn = prompt[: end + 1] + tokens(20, seed=13)
            answer, num_found = generate(llm, turn)
            assert num_found == end
            assert answer == cold(llm, turn)


def test_blocks_that_no_request_can_go_on_behind_are_evicted_first(write: Write) -> None:
    older, younger = tokens(200, seed=20), tokens(300, seed=21)
    with open_llm(write()) as llm:
        answers = [generate(llm, prompt)[0] for prompt in (older, younger)]
        assert llm.demote("host", timeout_s=10)
        tiers = llm.core.parts.tiers
        [root] = {it.root for it in tiers.catalog.entries()}
        chain = chain_hashes(root, younger, 16)
        places = [it for it in tiers.catalog.entries() if it.kind and it.parent_hash in chain]
        parts = {it.parent_hash: it.block_hash for it in places}  # one of each place
        assert [chain.index(it) for it in parts] == [11, 15]
        assert not tiers.catalog.superseded
        for part in parts.values():
            assert tiers.drop_copy(Tier.HOST, part)
        llm.core.cache.pump()
        assert tiers.catalog.superseded == {*chain[:16]}
        taken = tiers.allocate(Tier.HOST, tiers.host.num_empty + 16)
        assert taken is not None
        assert not any(tiers.host.find(chain[:16]))
        tiers.host.release(taken)
        for prompt, answer, expected in zip((older, younger), answers, (192, 0), strict=True):
            assert generate(llm, prompt) == (answer, expected)
        assert tiers.catalog.superseded.isdisjoint(chain)


def test_a_request_that_leaves_another_one_in_its_last_cells_finds_what_is_before(
    write: Write,
) -> None:
    prompt = tokens(230, seed=1)
    with open_llm(write()) as llm:
        generate(llm, prompt)
        for at in (100, 128, 150, 191, 192, 229):
            other = prompt[:at] + tokens(30, seed=at)
            answer, num_found = generate(llm, other)
            assert num_found >= at - 2 * GRID
            assert answer == cold(llm, other)


def until_aborted(
    llm: LLM, prompt: list[int], num_made: int, stop: tuple[str, ...] = ()
) -> list[int]:
    """Return so many tokens of an answer, which is aborted then."""
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, stop=stop)
    asked, answer = llm.make_request(prompt, params), list[int]()
    llm.core.add_request(asked)
    while len(answer) < num_made:
        outputs: list[TokenOutput] = llm.core.step()
        answer += [token for output in outputs for token in output.token_ids]
        llm.core.wait(0.01)
    llm.core.abort(asked.request_id)
    llm.core.step()
    return answer


@pytest.mark.parametrize("end", [GRID - 1, GRID, GRID + 1, 2 * GRID, 2 * GRID + 1])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_the_next_turn_goes_on_at_the_last_place_of_the_answer(
    write: Write, end: int, is_aborted: bool
) -> None:
    prompt = tokens(100, seed=2)
    num_made = 128 + end - len(prompt)
    with open_llm(write()) as llm:
        make = until_aborted if is_aborted else lambda *asked: generate(*asked)[0]
        answer = make(llm, prompt, num_made)
        llm.core.cache.check()
        text = prompt + answer
        turn = text + tokens(20, seed=3)
        found, num_found = generate(llm, turn)
        # The last token of an answer that ends by its length is not computed.
        num_computed = len(text) - (not is_aborted)
        assert num_found == num_computed // GRID * GRID
        assert found == cold(llm, turn)


@pytest.mark.parametrize("num_late", [1, 2, 3, 20])
def test_the_next_turn_of_an_answer_that_a_stop_string_has_ended_goes_on_before_its_end(
    write: Write, tmp_path: Path, num_late: int
) -> None:
    prompt = tokens(100, seed=2)
    options: dict[str, Any] = {"disk_dir": str(tmp_path / "store"), "disk_size": "64MiB"}
    options |= {"restore": "load", "default_retention": "24h"}
    with open_llm(write(), **options) as llm:
        answer = until_aborted(llm, prompt, 3 * GRID - 1 + num_late - len(prompt), ("none",))
        llm.core.cache.check()
        assert llm.core.cache.flush(Tier.DISK, deadline=time.monotonic() + 20)
        for known, expected in ((answer[:-num_late], 2 * GRID), (answer, 3 * GRID)):
            turn = prompt + known + tokens(20, seed=3)
            found, num_found = generate(llm, turn)
            assert num_found == expected
            assert found == cold(llm, turn)


@pytest.mark.parametrize("name", few(["qwen3_5", "olmo_hybrid", "qwen3_next"]))
@pytest.mark.parametrize("restore", ["load", "auto"])
def test_states_come_back_from_host_memory_and_disk_and_after_a_restart(
    write: Write, tmp_path: Path, name: str, restore: str
) -> None:
    folder, prompt = write(name), tokens(400, seed=4)
    options: dict[str, Any] = {"disk_dir": str(tmp_path / "store"), "disk_size": "64MiB"}
    options |= {"restore": restore, "default_retention": "24h", "max_num_batched_tokens": 100}
    turn = prompt + tokens(30, seed=5)
    with open_llm(folder, **options) as llm:
        expected = cold(llm, turn)
        generate(llm, prompt)
        for tier in (Tier.HOST, Tier.DISK):
            assert llm.core.cache.flush(tier, deadline=time.monotonic() + 20)
            answer, num_found = generate(llm, turn)
            assert answer == expected
            assert num_found == 384 or restore == "auto"
            assert llm.core.cache.flush(Tier.DISK, deadline=time.monotonic() + 20)
    with open_llm(folder, **options) as llm:
        answer, num_found = generate(llm, turn)
        assert answer == expected
        assert num_found == 384 or restore == "auto"


def test_of_a_disk_that_has_not_told_what_it_has_few_parts_of_states_are_asked_for(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, asked = tokens(400, seed=4), list[BlockHash]()
    options: dict[str, Any] = {"disk_dir": str(tmp_path / "store"), "disk_size": "64MiB"}
    options |= {"restore": "load", "default_retention": "24h"}
    with open_llm(write(), **options) as llm:
        tiers, spec = llm.core.parts.tiers, llm.core.kv_spec
        expected, _ = generate(llm, prompt)
        assert llm.core.cache.flush(Tier.DISK, deadline=time.monotonic() + 20)
        monkeypatch.setattr(Presence, "until", lambda _, hashes: np.zeros(len(hashes), "<u4"))
        tiers.presence.is_whole, look_up = False, tiers.disk_link.look_up

        def note(hashes: Sequence[BlockHash], use: Callable[..., object]) -> None:
            asked.extend(hashes)
            look_up(hashes, use)

        monkeypatch.setattr(tiers.disk_link, "look_up", note)
        answer, num_found = generate(llm, prompt)
    assert (answer, num_found) == (expected, 384)
    assert len({*asked}) == len(prompt) // 16 + 384 // GRID + spec.state_pages - 1
    assert len(asked) <= len({*asked}) + 1  # the age of a block that was computed again


@pytest.mark.parametrize(
    ("first", "more", "generated", "block_size"),
    few([(150, 9, 80, 16), (200, 17, 120, 64), (64, 31, 160, 16), (150, 9, 80, 64)], 2),
)
def test_a_request_that_is_sent_back_goes_on_where_it_was(
    write: Write, first: int, more: int, generated: int, block_size: int
) -> None:
    prompts = [tokens(first + more * n, seed=n) for n in range(8)]
    params = SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True)
    folder = write()
    with open_llm(folder, block_size=block_size) as llm:
        spec = llm.core.kv_spec
        expected = [cold(llm, prompt, generated) for prompt in prompts]
    longest = -(-(len(prompts[-1]) + generated) // block_size)
    room = 3 * (longest + 2 * spec.state_pages) // 2
    with open_llm(folder, block_size=block_size, device_size=room * spec.block_bytes) as llm:
        answers = llm.generate(prompts, params)
        llm.core.cache.check()
        assert [answer.token_ids for answer in answers] == expected
        assert llm.core.scheduler.num_preemptions
        most = sum(len(prompt) + generated - 1 for prompt in prompts)
        assert llm.core.scheduler.num_computed_tokens <= 1.1 * most


def test_the_disk_is_asked_for_states_of_blocks_that_have_names_only(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(write(), disk_dir=str(tmp_path), disk_size="8MiB") as llm:
        monkeypatch.setattr(llm.core.parts.tiers.presence, "is_whole", False)
        prompt = tokens(200, seed=0)
        chain = llm.core._chains.make(llm.make_request(prompt, SamplingParams()), prompt)
        tail, tails = chain.tail, llm.core.cache._tails
        assert isinstance(tail, StateTail)
        asked = tails.unknown(tail)
        tail.most_end += 20  # as of a request that was sent back with tokens that it had generated
        assert tails.unknown(tail) == asked
        assert len(asked) >= 200 // GRID


def test_requests_that_share_a_prefix_go_on_where_the_first_ones_have_parted(write: Write) -> None:
    shared = tokens(600, seed=6)
    prompts = [shared + tokens(40, seed=n) for n in range(6)]
    with open_llm(write(), device_size="32MiB") as llm:
        expected = [cold(llm, prompt) for prompt in prompts]
        found = [generate(llm, prompt) for prompt in prompts]
    assert [answer for answer, _ in found] == expected
    assert [num_found for _, num_found in found[2:]] == [576] * 4


def test_a_state_is_as_old_as_what_it_was_continued_from(write: Write) -> None:
    with open_llm(write()) as llm:
        tiers, text = llm.core.parts.tiers, tokens(100, seed=7)
        begun = tiers.clock.now()
        for minute in range(0, 57, 8):
            tiers.clock.advance_to(begun + 60 * minute)
            _, num_found = generate(llm, text, 1)
            assert num_found > 0 or not minute
            text = text + tokens(70, seed=minute)
        ages = {round(entry.computed_at - begun) for entry in tiers.catalog.entries() if entry.kind}
        assert max(ages) < 60  # though the last blocks were computed nearly an hour later
        tiers.clock.advance_to(begun + 3660)
        assert generate(llm, text, 1)[1] == 0


def test_parts_of_two_computations_never_make_one_state(write: Write) -> None:
    prompt, folder = tokens(200, seed=8), write()
    with open_llm(folder) as llm:
        tiers = llm.core.parts.tiers
        expected, _ = generate(llm, prompt)
        chain = llm.core._chains.make(llm.make_request(prompt, SamplingParams()), prompt)
        assert isinstance(chain.tail, StateTail)
        needed = chain.tail.needed(192 // 16)
        names = chain.tail.hashes[needed.start : needed.stop]
        assert len(names) > 1 and not tiers.device.missing(names)
        before = {entry.block_hash: entry for entry in tiers.catalog.entries()}
        tiers.drop(names[1], "admin")
        _, num_found = generate(llm, prompt + tokens(3, seed=9))
        assert num_found == 128
        after = {entry.block_hash: entry for entry in tiers.catalog.entries()}
        assert all(after[name] is not before[name] for name in names)
        again, num_found = generate(llm, prompt)
        assert (again, num_found) == (expected, 192)


def test_what_no_state_fills_of_its_pages_keeps_nothing_of_what_was_there(write: Write) -> None:
    with open_llm(write(linear_key_head_dim=20)) as llm:
        spec, blocks = llm.core.kv_spec, llm.core.parts.device_blocks
        num_filled = spec.page_pieces * 4 * spec.states[0].piece_elements
        assert num_filled < spec.block_bytes
        blocks.fill_(0xAA)
        generate(llm, tokens(150, seed=10), 80)
        tiers = llm.core.parts.tiers
        held = [tiers.device.lookup(it.block_hash) for it in tiers.catalog.entries() if it.kind]
        pages = [blocks[block.block_id] for block in held if block is not None]
        assert pages
        for page in pages:
            assert not page[num_filled:].any()
            assert page[:num_filled].any()


@pytest.mark.parametrize("damage", ["zero", "swap"])
def test_a_state_that_is_not_that_of_its_prompt_would_be_seen(write: Write, damage: str) -> None:
    prompt = tokens(200, seed=11)
    with open_llm(write()) as llm:
        expected, _ = generate(llm, prompt, 40)
        tiers, blocks = llm.core.parts.tiers, llm.core.parts.device_blocks
        for entry in tiers.catalog.entries():
            if entry.kind and (block := tiers.device.lookup(entry.block_hash)) is not None:
                page = blocks[block.block_id].view(torch.float32)
                page[:] = 0.0 if damage == "zero" else page.flip(0)
        answer, num_found = generate(llm, prompt, 40)
        assert num_found == 192
        assert answer != expected


def test_a_hybrid_that_cannot_be_held_is_refused_before_memory_is_taken(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr("tieredkv.engine.parts.HostArena", never)
    large = write(linear_key_head_dim=64, linear_value_head_dim=64)
    with refused(ConfigError):
        open_llm(large)


def test_too_little_vram_for_a_state_is_told(write: Write) -> None:
    with refused(ConfigError):
        open_llm(write(), device_size="32KiB")


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_num_value_heads": 3},
        {"linear_num_value_heads": -4},
        {"linear_conv_kernel_dim": 0},
        {"linear_conv_kernel_dim": 1},
        {"hidden_act": "gelu"},
        {"layer_types": ["linear_attention"] * 4},
    ],
)
def test_hybrids_that_cannot_be_computed_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model_type, told = FAMILIES["qwen3_5"]
    config = make_config(model_type, told)
    for field, value in changes.items():
        setattr(config, field, value)
    config.save_pretrained(tmp_path)
    with refused(ModelError):
        find_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    "changes",
    [{"linear_num_value_heads": 2}, {"linear_conv_kernel_dim": 3}, {"linear_value_head_dim": 32}],
)
def test_weights_of_states_of_another_shape_are_refused_by_name(
    write: Write, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shutil.copytree(write(), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **changes)
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        find_model(str(tmp_path), device="cpu")


def test_a_gpu_without_the_kernels_of_states_is_told(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(loader, "_resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(importlib.metadata, "version", missing)
    folder = write()
    with refused(ModelError, hide={str(folder): "FOLDER"}):
        find_model(str(folder))
