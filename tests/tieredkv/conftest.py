"""Fixtures that several tests of the cache, or of the server, use."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_store import Rig
from tests.folder_store import FolderStore
from tieredkv.clock import Clock
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.server import app
from tieredkv.server.chat import Tokenization
from tieredkv.server.grammar_checker import GrammarChecker


@pytest.fixture(scope="module")
def tokenization() -> Tokenization:
    """Return the small model's tokenizer, as the server uses it."""
    return Tokenization(load_tokenizer("tiny-random"))


@pytest.fixture
def slow_disk() -> Rig:
    """Return a cache that computes all, since that is faster than its disk."""
    rig = Rig(restore="auto")
    rig.tiers.disk_link.read_rate.bytes_per_s = 1e-3
    return rig


@pytest.fixture(params=["fake", "folder"])
def each_tier(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run a test with a fake of the disk, and again with the toy of another tier."""
    if request.param == "folder":
        numbers = itertools.count()

        def make(arena: torch.Tensor, clock: Clock) -> FolderStore:
            return FolderStore(tmp_path / f"tier-{next(numbers)}", arena, clock)

        monkeypatch.setattr(Rig, "make_store", make)


class KeptChecker(GrammarChecker):
    """A checker of grammars that the next server goes on with."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="package", autouse=True)
def one_process_for_grammars() -> Iterator[None]:
    """Have the servers of all tests share one process for their grammars: it starts for seconds."""
    kept = dict[Any, KeptChecker]()

    def find(model: str, info: EngineInfo, timeout_s: float) -> KeptChecker:
        key = model, info.vocab_size, *info.eos_token_ids, timeout_s
        return kept.setdefault(key, KeptChecker(model, info, timeout_s))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "GrammarChecker", find)
        yield
    for checker in kept.values():
        GrammarChecker.close(checker)
