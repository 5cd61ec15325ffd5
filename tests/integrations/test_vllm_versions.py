"""A vLLM that lacks something is refused in one sentence; one that was not tried is warned of."""

import importlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from tests import golden
from tests.golden import refused
from tests.integrations import vllm_standin
from tests.integrations.conftest import Setup
from tests.integrations.engines import HAS_VLLM, RealEngine
from tieredkv.errors import ConfigError
from tieredkv.integrations import vllm_settings

without_vllm = pytest.mark.skipif(HAS_VLLM, reason="the stand-in takes the place of vLLM")


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [("0.33.0", True), ("0.26.1", True), ("0.33.0rc1", True), ("0.27.0", False), ("1.2", False)],
)
def test_a_version_that_was_not_tried_is_warned_of(
    version: str, is_tried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_settings.warn_if_untried(version)
    assert len(caplog.records) == (not is_tried)
    for record in caplog.records:
        golden.told(record.getMessage(), hide={version: "VERSION"})


@without_vllm
def test_the_tier_warns_when_it_starts(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    class NewerEngine(setup.kind):  # type: ignore[name-defined, misc]
        version = "0.99.0"

    setup.open()
    assert not golden.warnings_of(caplog, vllm_settings.__name__)
    setup.close(setup.engines[0])
    setup.kind = NewerEngine
    setup.open()
    (warning,) = golden.warnings_of(caplog, vllm_settings.__name__)
    golden.told(warning)


@without_vllm
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.v1.kv_offload.base", "LookupResult"),
        ("vllm.v1.kv_offload.base", "OffloadPolicy"),
        ("vllm.v1.kv_offload.tiering.base", "JobResult"),
        ("vllm.v1.kv_offload.tiering.base", ""),
    ],
)
def test_a_vllm_without_the_interface_is_told_of(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_standin.install(monkeypatch, is_older=False)
    if name:
        monkeypatch.delattr(sys.modules[module], name)
    else:
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(sys.modules["vllm.v1.kv_offload.tiering"], "base")
    with refused(ImportError):
        importlib.import_module("tieredkv.integrations.vllm")


@without_vllm
@pytest.mark.parametrize("part", ["parallel", "groups", "model"])
def test_a_vllm_that_tells_too_little_is_refused(part: str, setup: Setup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        vllm_standin.install(patch, is_older=False)
        module = importlib.import_module("tieredkv.integrations.vllm")
    told: dict[str, Any] = {
        "model": types.SimpleNamespace(name=str(setup.model), dtype="bfloat16"),
        "groups": [types.SimpleNamespace(tokens_per_block=16, layer_names=("a",))],
        "cache": types.SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": types.SimpleNamespace(data_parallel_index=0, data_parallel_size=1),
    }
    del told[part]
    spec = types.SimpleNamespace(config=types.SimpleNamespace(**told))
    rows: Any = np.zeros((4, 8192), np.int8)
    with refused(ConfigError):
        module.TieredKVTier(spec, memoryview(rows), "TieredKVTier", disk_dir=str(setup.folder))


@pytest.mark.parametrize("shape", [(0, 8192), (4, 0), (8192,)])
def test_a_memory_for_less_than_one_chunk_is_refused(shape: tuple[int, ...]) -> None:
    rows: Any = np.zeros(shape, np.int8)
    with refused(ConfigError):
        vllm_settings.shape_of(memoryview(rows))


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM's own metrics")
def test_the_figures_are_on_vllms_metrics_page(setup: Setup) -> None:
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics

    engine = setup.open()
    assert isinstance(engine, RealEngine)
    chain = engine.chain("a", 2)
    engine.store(chain)
    engine.forget()
    engine.hits(chain)
    engine.tier._told_at = float("-inf")
    extra = {**engine.spec.extra_config, "spec_name": "TieringOffloadingSpec"}
    transfer = types.SimpleNamespace(kv_connector_extra_config=extra)
    config: Any = types.SimpleNamespace(kv_transfer_config=transfer)
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)

    def made(kind: Any) -> Any:
        def make(**told: Any) -> Any:
            return kind(**told, registry=registry)

        return make

    page = metrics.OffloadPromMetrics(
        config, {kind: made(kind) for kind in kinds}, ["engine"], {0: ["0"]}
    )
    page.observe(engine.manager.get_stats().data)
    text = prometheus_client.generate_latest(registry).decode()
    assert 'tieredkv_lookups_total{engine="0",result="hit"} 2.0' in text
    assert f'tieredkv_loaded_bytes_total{{engine="0"}} {2.0 * engine.row_bytes}' in text
    assert 'tieredkv_disk_chunks{engine="0"} 2.0' in text
