"""Random sessions of models with pages beside blocks: cold tokens, and nothing left behind."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tests.levels import few
from tieredkv import LLM, SamplingParams
from tieredkv.cache.disk_link import DiskLink
from tieredkv.cache.tail import anchor_pages
from tieredkv.engine.engine_messages import Claim, EngineRequest
from tieredkv.errors import BlocksLostError
from tieredkv.operate.calls import EvictFilter
from tieredkv.types import BlockHash, Tier

NAMES = ["gpt_oss", "qwen3_5", "gemma4 with shared keys", "gemma3", "qwen3_next", "olmo3", "gemma4"]
NAMES += ["mistral", "olmo_hybrid"]
NUM_LIVES, NUM_BATCHES = 2, 8
LIMIT_S = 60.0
TIE = 1e-5  # of logits; the order of float32 sums moves them by some 1e-6


class Cold(NamedTuple):
    """The tokens of a cold answer, and the logits that each was chosen by."""

    token_ids: list[int]
    logits: list[torch.Tensor]

    def allows(self, token_ids: list[int]) -> bool:
        """Return whether an answer has the same tokens, up to one that was as likely."""
        assert len(token_ids) == len(self.token_ids)
        for right, token, logits in zip(self.token_ids, token_ids, self.logits, strict=True):
            if right != token:
                return float(logits[right] - logits[token]) < TIE
        return True


class Sessions:
    """Draws requests that go on from earlier ones, repeat them, edit them, or leave them.

    Attributes:
        may_be_written: blocks and pages that some request has let onto the disk.
    """

    def __init__(self, folder: Path, draw: random.Random, block_size: int) -> None:
        self._draw, self._texts, self._cold = draw, list[tuple[list[int], int]](), 0
        self.may_be_written = set[BlockHash]()
        options: dict[str, Any] = {"device_size": "16MiB", "host_size": "1MiB"}
        self._llm = LLM(
            str(folder), device="cpu", block_size=block_size, restore="compute", **options
        )

    def request(self, llm: LLM) -> tuple[EngineRequest, Cold]:
        """Return a request and its cold answer."""
        draw, prompt = self._draw, self._prompt()
        length = draw.choice([1, 9, 40])
        stop = draw.choice([(), ("is never said",)])
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, stop=stop)
        self._cold += 1
        logits = list[torch.Tensor]()
        self._llm.core.on_logits = lambda _, row: logits.append(row.clone())
        [answer] = self._llm.generate([prompt], params, cache_salt=str(self._cold))
        text = prompt + answer.token_ids
        self._texts.append((text, len(prompt)))
        asked: dict[str, Any] = {
            "retention": draw.choice(["24h", "in_memory"]),
            "cache_salt": draw.choice([None, None, "salt"]),
            "anchors": draw.choice([[], [draw.randint(1, len(prompt))]]),
            "cacheable_tokens": draw.choice([None, None, None, len(prompt) // 2]),
        }
        chain = llm.core._chains.make(
            llm.make_request(text, params, cache_salt=asked["cache_salt"]), text
        )
        end = len(chain.hashes) if asked["retention"] == "24h" else 0
        if draw.random() < 0.3:
            claim = Claim(end_token=len(prompt) // 2, retention="24h", pin_s=draw.choice([0, 900]))
            asked["claims"] = [claim]
            end = max(end, claim.end_token // llm.core.kv_spec.block_size)
        self.may_be_written.update(chain.hashes[:end])
        if chain.tail is not None:
            pages = chain.tail.pages_of(0, end)
            self.may_be_written.update(chain.tail.hashes[pages.start : pages.stop])
        return llm.make_request(prompt, params, **asked), Cold(answer.token_ids, logits)

    def _prompt(self) -> list[int]:
        draw = self._draw
        new = draw.choices(range(10, 256), k=draw.randint(1, 90))
        if not self._texts:
            return new
        text, num_prompt = draw.choice(self._texts[-8:])
        before = draw.choice([len(text), len(text) - draw.randint(1, 30), num_prompt])
        cut = draw.choice([before, before, draw.randint(1, len(text))])
        made = text[: max(1, cut)] + draw.choice([new, new, [], new + text[cut + 20 :]])
        return made[:360]

    def close(self) -> None:
        self._llm.close()


def serve(llm: LLM, some: list[tuple[EngineRequest, Cold]], draw: random.Random) -> None:
    """Answer requests together, some of which are aborted, and verify the other answers."""
    core, deadline = llm.core, time.monotonic() + LIMIT_S
    answers = {asked.request_id: list[int]() for asked, _ in some}
    unfinished, aborted = set(answers), set[str]()
    for asked, _ in some:
        core.add_request(asked)
    while unfinished:
        assert time.monotonic() < deadline, "a request hangs"
        for output in core.step():
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
        disturb(llm, draw)
        if unfinished and draw.random() < 0.01:
            request_id = draw.choice(sorted(unfinished))
            aborted.add(request_id)
            core.abort(request_id)
        core.wait(0.02)
    for asked, cold in some:
        assert asked.request_id in aborted or cold.allows(answers[asked.request_id])


def disturb(llm: LLM, draw: random.Random) -> None:
    """Evict something, kill the store's worker, or let time pass; mostly do nothing."""
    core, chance = llm.core, draw.random()
    if chance < 0.005:
        core.verbs.evict(EvictFilter(all=True, tiers=draw.choice([(Tier.DEVICE,), (Tier.HOST,)])))
    elif chance < 0.007:
        core.verbs.evict()
    elif chance < 0.008 and (disk := core.operations.disk) is not None and disk.pid:
        os.kill(disk.pid, signal.SIGKILL)
    elif chance < 0.012:
        clock = core.parts.tiers.clock
        clock.advance_to(clock.now() + draw.choice([61, 599, 3601]))
    elif chance < 0.1:
        core.cache.check()


def settle(llm: LLM) -> None:
    """Wait until nothing is moved any more, and verify that nothing is held."""
    core, tiers, deadline = llm.core, llm.core.parts.tiers, time.monotonic() + LIMIT_S
    while core.has_work or tiers.host.num_used:
        assert time.monotonic() < deadline
        core.step()
        core.wait(0.01)
    core.cache.check()
    core.scheduler.check()
    assert not tiers.device.num_used
    assert not core.cache.is_recalling


@pytest.mark.parametrize("seed", few(range(36), 2))
def test_random_sessions_give_cold_tokens_and_leave_nothing_behind(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    model_type, changes = FAMILIES[NAMES[seed % len(NAMES)]]
    write_checkpoint(tmp_path, make_config(model_type, changes | {"max_position_embeddings": 1024}))
    block_size = draw.choice([16, 16, 32])
    sessions = Sessions(tmp_path, draw, block_size)
    write = DiskLink.write

    def check_and_write(link: DiskLink, record: Any, *rest: Any) -> None:
        assert record.block_hash in sessions.may_be_written
        write(link, record, *rest)

    monkeypatch.setattr(DiskLink, "write", check_and_write)
    spec = sessions._llm.core.kv_spec
    least = 420 // block_size + 2 + anchor_pages(spec) + 4 * len(spec.page_kinds)
    for _ in range(NUM_LIVES):
        options: dict[str, Any] = {
            "device_size": draw.choice([1, 2, 4]) * least * spec.block_bytes,
            "host_size": max(4, int(draw.choice([0.1, 0.5, 2]) * least)) * spec.page_bytes,
            "max_num_batched_tokens": draw.choice([17, 33, 64, 512]),
            "max_num_seqs": draw.choice([2, 8]),
            "restore": draw.choice(["auto", "auto", "load", "compute"]),
            "disk_dir": str(tmp_path / "store"),
            "disk_size": "8MiB",
        }
        llm = LLM(str(tmp_path), device="cpu", block_size=block_size, **options)
        for _ in range(NUM_BATCHES):
            num_requests = draw.choice([1, 1, 2, 5])
            serve(llm, [sessions.request(llm) for _ in range(num_requests)], draw)
            if draw.random() < 0.5:
                settle(llm)
            if draw.random() < 0.2:
                llm.demote(draw.choice(["host", "disk"]), timeout_s=5)
        settle(llm)
        with contextlib.suppress(BlocksLostError):  # the worker may just have been killed
            llm.close()
    sessions.close()
