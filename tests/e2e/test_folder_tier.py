"""A tier that only the tests have is all that the disk is to users, by one registration.

Tests of the disk that run with it as well ask for the fixture `any_tier`; those of the cache alone
ask for `each_tier`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.e2e.test_claims import serve
from tests.folder_tier import FOLDER, FolderTier
from tests.prompts import prompt
from tieredkv import LLM
from tieredkv.engine import parts
from tieredkv.operate.calls import Df, EvictFilter
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.metrics import Metrics
from tieredkv.types import Tier

SIZES: dict[str, Any] = {"device_size": "16MiB", "host_size": "16MiB", "disk_size": "64MiB"}


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(parts, "TIER", FOLDER)
    with LLM("tiny-random", retention="24h", disk_dir=str(tmp_path / "tier"), **SIZES) as llm:
        yield llm


def tier_of(llm: LLM) -> FolderTier:
    tier = llm.core.parts.tiers.store
    assert isinstance(tier, FolderTier)
    return tier


def test_it_is_named_in_usage_df_and_metrics(llm: LLM) -> None:
    serve(llm, prompt(1, 500))
    assert llm.demote("disk")
    assert serve(llm, prompt(1, 500)).usage.cached_tokens_by_tier[Tier.DISK] == 496
    told = list[dict[str, Any]]()
    llm.core.verbs.operate(Df(), lambda body, _: told.append(body))
    while not told:
        llm.core.step()
    size, disk = 31 * llm.core.kv_spec.block_bytes, told[0]["disk"]
    assert (disk["blocks"], disk["bytes_live"], disk["bytes_budget"]) == (31, size, 64 << 20)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(told[0]))  # to the server
    engine = SimpleNamespace(stats=sent, info=llm.core.info)
    lines = Metrics(llm.core.settings, cast(EngineClient, engine)).text().decode().splitlines()
    assert 'tieredkv_tier_blocks{tier="disk"} 31.0' in lines
    assert 'tieredkv_disk_state{state="ok"} 1.0' in lines


def test_it_is_emptied_by_an_eviction_of_one_namespace(llm: LLM) -> None:
    tier = tier_of(llm)
    serve(llm, prompt(1, 500), cache_salt="a")
    assert llm.demote("disk")
    [doomed] = {record.namespace for record in tier.records.values()}
    serve(llm, prompt(1, 500), cache_salt="b")
    assert llm.demote("disk")
    serve(llm, prompt(1, 500), cache_salt="a")  # its blocks are in VRAM and host memory as well
    tier.ask(EvictFilter(namespace_prefix=doomed.hex()))
    while tier.stats().deleted != {"operator": 31}:
        llm.core.step()
    assert len(tier.records) == 31 and doomed not in {it.namespace for it in tier.records.values()}
    usage = serve(llm, prompt(1, 500), cache_salt="a").usage
    assert (usage.cached_tokens, usage.miss_reason) == (0, "admin")
    usage = serve(llm, prompt(1, 500), cache_salt="b").usage
    assert (usage.cached_tokens_by_tier[Tier.DISK], usage.miss_reason) == (496, None)


def test_a_damaged_file_is_a_miss_and_its_block_is_computed(llm: LLM, tmp_path: Path) -> None:
    cold = serve(llm, prompt(1, 500))
    assert llm.demote("disk")
    by_position = {it.position: it.block_hash for it in tier_of(llm).records.values()}
    path = tmp_path / "tier" / by_position[7].hex()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = serve(llm, prompt(1, 500))
    assert again.token_ids == cold.token_ids
    assert again.usage.cached_tokens_by_tier[Tier.DISK] == 480
    assert (again.usage.miss_reason, again.usage.miss_token) == ("corrupt", 112)
    assert tier_of(llm).stats().faults == {"checksum": 1}
