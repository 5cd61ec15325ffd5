"""A model with windows or states goes on from what a killed store has of them, with cold tokens."""

import contextlib
import os
import random
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import xxhash

from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tests.engine.test_tails import BLOCK, digests, generate, open_llm, tokens
from tests.storage.blocks import load, open_store, sweep, verify
from tieredkv import LLM, SamplingParams
from tieredkv.cache.chain import Chain
from tieredkv.cache.disk_link import DiskLink, Told, Write
from tieredkv.cache.state_tail import StateTail
from tieredkv.clock import Clock
from tieredkv.config import CLOCK_OFFSET_VARIABLE
from tieredkv.errors import BlocksLostError
from tieredkv.operate.calls import EvictFilter
from tieredkv.types import BlockHash, Tier

LATER_S = 5 * 3600  # from one life to the next, so that pages expire after five
OLDER_TEXTS = 2  # that are repeated besides those of the life before
MODELS = {"gemma4": {"sliding_window": 40}, "qwen3_5": {"linear_num_value_heads": 24}}


class Lives:
    """Lives of an engine on one store, each of which ends with a kill of the store's worker.

    Attributes:
        counted: the counters of all lives.
    """

    def __init__(self, folder: Path, seed: int, family: str) -> None:
        self._model, self._store = folder / "model", folder / "store"
        self._clock_file, self._copy = folder / "clock-offset", folder / "copy"
        model_type, changes = FAMILIES[family]
        changes = changes | MODELS[family] | {"max_position_embeddings": 1024}
        write_checkpoint(self._model, make_config(model_type, changes))
        self._cold, self._num_cold = open_llm(self._model, restore="compute"), 0
        self._draw, self.counted = random.Random(seed), Counter[str]()
        self._texts, self._num_older, self._num_lives = list[list[int]](), 0, 0
        self._computed = defaultdict[BlockHash, set[str]](set)
        self._acknowledged = set[BlockHash]()
        self._there = dict[BlockHash, float]()  # what the store has, and until when

    def live(self, *, is_last: bool = False) -> None:
        """Repeat what earlier lives have answered, answer more, and kill the worker amid writes."""
        self._clock_file.write_text(str(self._num_lives * LATER_S))
        self._num_lives += 1
        self._acknowledged, now = set(), Clock(str(self._clock_file)).now()
        self._there = {it: until for it, until in self._there.items() if until > now}
        how = {"disk_dir": str(self._store), "disk_size": "8MiB", "disk_encryption": "off"}
        with (
            patch.dict(os.environ, {CLOCK_OFFSET_VARIABLE: str(self._clock_file)}),
            patch.object(DiskLink, "poll", self._noting(DiskLink.poll)),
            contextlib.suppress(BlocksLostError),
            open_llm(self._model, **how, default_retention="24h", restore="load") as llm,
        ):
            older, last = self._texts[: self._num_older], self._texts[self._num_older :]
            older = self._draw.sample(older, min(OLDER_TEXTS, len(older)))
            for text in [*older, *last]:
                self._repeat(llm, text)
                self._note_computed(llm)
                while not llm.core.cache.flush(Tier.DISK, deadline=0):
                    pass  # a state that was computed anew has left the disk until it is written
                llm.core.verbs.evict(EvictFilter(all=True, tiers=(Tier.DEVICE, Tier.HOST)))
            if not is_last:
                self._answer(llm)
                self._kill(llm)
        if not is_last:
            self._look(llm)

    def _noting(self, poll: Any) -> Any:
        def note(link: DiskLink) -> Iterator[Told]:
            for told in poll(link):
                if isinstance(told, Write) and not told.reason:
                    block_hash = BlockHash(told.record.block_hash)
                    self._acknowledged.add(block_hash)
                    self._there[block_hash] = told.record.expires_at
                yield told

        return note

    def _repeat(self, llm: LLM, text: list[int]) -> None:
        """Answer a text, with nothing of it in RAM, and verify what is used of the store."""
        self._num_cold += 1
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        [cold] = self._cold.generate([text], params, cache_salt=str(self._num_cold))
        answer, usage = generate(llm, text)
        assert answer == cold.token_ids, "wrong tokens"
        end = self._whole_end(chain_of(llm, text))
        assert usage.cached_tokens == end * BLOCK, "a wrong hit"
        self.counted["hits verified"] += end > 0
        for block_hash, digest in digests(llm, text[: end * BLOCK]).items() if end else ():
            assert digest in self._computed[block_hash], "wrong bytes were loaded"
            self.counted["blocks verified"] += 1

    def _whole_end(self, chain: Chain) -> int:
        """Return behind how many blocks all is there that a request needs to go on."""
        assert chain.tail is not None
        lacking = (i for i, it in enumerate(chain.hashes) if it not in self._there)
        most = min(next(lacking, len(chain.hashes)), chain.tail.most_end)
        for end in range(most, 0, -1):
            # A window of 40 reaches 39 back. A state is at multiples of 64 tokens, and its parts
            # are of one time: one that was computed anew may have replaced only some of them.
            is_state = isinstance(chain.tail, StateTail)
            needed = chain.tail.pages_of(end - 1 if is_state else max(0, end - 3), end)
            ends = {self._there.get(chain.tail.hashes[index]) for index in needed}
            is_one = len(ends) == 1 and end * BLOCK % 64 == 0
            if None not in ends and (is_one or not is_state):
                return end
        return 0

    def _answer(self, llm: LLM) -> None:
        """Answer new texts and some that go on from old ones, turn after turn."""
        draw, self._num_older = self._draw, len(self._texts)
        for _ in range(3):
            new = tokens(draw.randint(20, 150), draw.randrange(1 << 30))
            text = draw.choice(self._texts[-6:]) if self._texts and draw.random() < 0.3 else new
            for _ in range(draw.randint(1, 3)):
                text = text + tokens(draw.randint(10, 60), draw.randrange(1 << 30))
                self._texts.append(text)
                text = text + generate(llm, text)[0]
        self._note_computed(llm)

    def _note_computed(self, llm: LLM) -> None:
        """Note the bytes of all pages in VRAM."""
        entries = llm.core.parts.tiers.catalog.entries()
        blocks = llm.core.operations.vram_blocks([entry.block_hash for entry in entries])
        for block_hash, block_id in blocks.items():
            data = llm.core.parts.device_blocks[block_id].numpy().data
            self._computed[block_hash].add(xxhash.xxh3_128_hexdigest(data))

    def _kill(self, llm: LLM) -> None:
        """Kill the worker while it writes, after a random number of pages; no other follows."""
        store, wanted = llm.core.parts.tiers.store, self._draw.randint(0, 150)
        assert store is not None
        pid = store.state().pid
        assert pid is not None
        while not llm.core.cache.flush(Tier.DISK, deadline=0) and len(self._acknowledged) < wanted:
            pass
        os.kill(pid, signal.SIGKILL)
        store.close()
        self.counted["kills"] += 1

    def _look(self, llm: LLM) -> None:
        """Verify a copy of the store that was left; note what is there."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._store, self._copy, ignore=shutil.ignore_patterns("sock*"))
        clock = Clock(str(self._clock_file))
        with open_store(self._copy, clock, budget_bytes=64 << 20) as store:
            store.check()
            hashes = [*self._computed]
            records = [record for record in store.lookup(hashes) if record is not None]
            for record in records:
                data = load(store, record)
                assert isinstance(data, bytes), f"an acknowledged page is lost: {data}"
                digest = xxhash.xxh3_128_hexdigest(data)
                assert digest in self._computed[BlockHash(record.block_hash)], "wrong bytes"
            sweep(store)
            store.check()
            self._there = {BlockHash(it.block_hash): it.expires_at for it in records}
            assert [it for it in store.lookup(hashes) if it is not None] == records
            assert verify(store).bad == 0
        assert self._acknowledged <= self._there.keys(), "an acknowledged page is lost"
        pages = Counter(record.parent_hash for record in records if record.kind)
        spec = llm.core.kv_spec
        num_parts = spec.state_pages or len(spec.page_kinds) - 1
        self.counted["torn blocks"] += sum(number < num_parts for number in pages.values())
        self.counted["blocks acknowledged"] += len(self._acknowledged)
        self.counted["blocks verified"] += len(records)

    def close(self) -> None:
        self._cold.close()


def chain_of(llm: LLM, text: list[int]) -> Chain:
    return llm.core._chains.make(llm.make_request(text, SamplingParams()), text)


def survive_kills(folder: Path, kills: int, seed: int, family: str) -> Counter[str]:
    """Kill the worker of an engine's store so many times; return the counters."""
    lives = Lives(folder, seed, family)
    for _ in range(kills):
        lives.live()
    lives.live(is_last=True)
    lives.close()
    return lives.counted


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_an_engine_goes_on_from_killed_stores_where_all_pages_are_there(
    tmp_path: Path, family: str
) -> None:
    counted = survive_kills(tmp_path, 12, 2, family)
    assert counted["torn blocks"] and counted["hits verified"], "they hit nothing"
