"""An answer that was given before counts as used now, as if its request had been the first."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tieredkv import LLM, SamplingParams
from tieredkv.cache.tail import tail_kinds

BLOCK, LENGTH = 16, 150
PROMPT = random.Random(1).choices(range(10, 256), k=100)
FOUND = (len(PROMPT) + LENGTH - 1) // BLOCK * BLOCK  # the last token of an answer is not computed


@pytest.fixture(params=["qwen3", "gpt_oss"])
def how(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return how an engine is opened."""
    model_type, changes = FAMILIES[request.param]
    write_checkpoint(tmp_path, make_config(model_type, changes | {"max_position_embeddings": 1024}))
    sizes = {"device_size": "16MiB", "host_size": "16MiB", "block_size": BLOCK}
    store = {"disk_dir": str(tmp_path / "store"), "disk_size": "64MiB"}
    return {"model": str(tmp_path), "device": "cpu", "restore": "load", **sizes, **store}


def answer(llm: LLM, prompt: list[int], retention: str, length: int = LENGTH) -> Any:
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    [answered] = llm.serve([llm.make_request(prompt, params, retention=retention)])
    llm.core.cache.check()
    return answered


def test_a_repeated_answer_is_kept_as_long_as_its_last_request_asks(how: dict[str, Any]) -> None:
    with LLM(**how) as llm:
        first = answer(llm, PROMPT, "in_memory").token_ids
        assert answer(llm, PROMPT, "24h").token_ids == first
    with LLM(**how) as llm:
        again = answer(llm, [*PROMPT, *first, *PROMPT[:20]], "24h", 1)
    assert again.usage.cached_tokens == FOUND


def test_a_repeated_answer_counts_as_used(how: dict[str, Any]) -> None:
    with LLM(**how) as llm:
        clock, begun = llm.core.parts.tiers.clock, llm.core.parts.tiers.clock.now()
        first = answer(llm, PROMPT, "in_memory").token_ids
        clock.advance_to(begun + 500)
        answer(llm, PROMPT, "in_memory")
        clock.advance_to(begun + 700)
        again = answer(llm, [*PROMPT, *first, *PROMPT[:20]], "in_memory", 1)
    assert again.usage.cached_tokens == FOUND


@pytest.mark.parametrize("how", ["gpt_oss"], indirect=True)
def test_the_end_of_a_repeated_answer_is_not_superseded(how: dict[str, Any]) -> None:
    with LLM(**how) as llm:
        device, catalog = llm.core.parts.tiers.device, llm.core.parts.tiers.catalog
        first = answer(llm, PROMPT, "in_memory").token_ids
        answer(llm, [*PROMPT, *first, *PROMPT[:90]], "in_memory", 1)
        pages = {
            entry.block_hash
            for entry in catalog.entries()
            if entry.kind and entry.position == FOUND // BLOCK - 1
        }
        assert len(pages) == len(tail_kinds(llm.core.kv_spec))
        assert pages <= catalog.superseded
        order = [block.block_hash for block in device.evictable()]
        assert set(order[: len(pages)]) <= catalog.superseded
        answer(llm, PROMPT, "in_memory")
        assert pages.isdisjoint(catalog.superseded)
        order = [block.block_hash for block in device.evictable()]
        assert order[0] not in pages
