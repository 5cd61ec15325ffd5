"""Equal weights have equal fingerprints in every process; different weights never do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden import refused
from tests.waiting import HANG_S
from tieredkv.engine import fingerprint
from tieredkv.engine.fingerprint import config_digest, files_fingerprint, parameters_fingerprint
from tieredkv.engine.loader import find_model
from tieredkv.errors import ModelError

CONFIG = {"model_type": "llama", "rope_parameters": {"rope_theta": 10000.0}, "hidden_size": 64}


@pytest.fixture(autouse=True)
def files_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also remember the digests of files that were written a moment ago."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer.{i}": torch.randn(64, 1024, generator=generator) for i in range(4)}
    save_file(tensors, path)
    return path


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["model", "sample"])
def test_one_bit_of_one_weight_changes_the_fingerprint(weights: Path, name: str) -> None:
    mode: Any = "full" if name == "model" else "sample"
    before = files_fingerprint(CONFIG, [weights], mode=mode)
    assert files_fingerprint(CONFIG, [weights], mode=mode) == before
    flip_bit(weights, weights.stat().st_size - 5)
    assert files_fingerprint(CONFIG, [weights], mode=mode) != before


def test_a_large_file_is_digested_in_pieces(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 4096)
    before = files_fingerprint(CONFIG, [weights])
    for offset in (100, 4095, 4096, 500_000):
        flip_bit(weights, offset)
        changed = files_fingerprint(CONFIG, [weights])
        assert changed != before
        flip_bit(weights, offset)
        assert files_fingerprint(CONFIG, [weights]) == before


def test_rope_settings_count_and_the_librarys_version_does_not() -> None:
    assert config_digest(CONFIG) != config_digest(
        CONFIG | {"rope_parameters": {"rope_theta": 500000.0}}
    )
    assert config_digest(CONFIG) == config_digest(
        CONFIG | {"transformers_version": "9", "_name_or_path": "elsewhere"}
    )
    assert config_digest(CONFIG) != config_digest(CONFIG | {"architectures": ["OtherForCausalLM"]})
    reordered = dict(reversed(CONFIG.items()))
    assert config_digest(CONFIG) == config_digest(reordered)


def unit_layer() -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


def test_another_release_of_the_modelling_code_is_another_model(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_fingerprint(CONFIG, [weights])
    drawn = parameters_fingerprint(CONFIG, unit_layer())
    monkeypatch.setattr(fingerprint, "transformers_version", "5.99.0")
    assert files_fingerprint(CONFIG, [weights]) != before
    assert parameters_fingerprint(CONFIG, unit_layer()) != drawn


def test_a_remembered_digest_is_used_until_the_file_changes(weights: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    seen: list[int] = []

    def fingerprint_now() -> bytes:
        seen.clear()
        return files_fingerprint(
            CONFIG, [weights], cache_dir=cache, progress=lambda _, done, of: seen.append(done)
        )

    first = fingerprint_now()
    assert seen[-1] == 1
    assert fingerprint_now() == first
    assert seen == []
    status = weights.stat()
    flip_bit(weights, 1000)
    assert fingerprint_now() != first
    assert seen
    flip_bit(weights, 1000)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint_now() == first


def test_a_replaced_file_of_equal_size_and_time_is_read_again(
    weights: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = files_fingerprint(CONFIG, [weights], cache_dir=cache)
    status = weights.stat()
    copy = tmp_path / "copy"
    shutil.copy(weights, copy)
    flip_bit(copy, 1000)
    copy.replace(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files_fingerprint(CONFIG, [weights], cache_dir=cache) != first


def test_a_file_written_over_in_place_is_read_again_though_its_times_were_put_back(
    weights: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    status = weights.stat()
    first = files_fingerprint(CONFIG, [weights], cache_dir=cache)
    flip_bit(weights, 1000)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = weights.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )
    assert files_fingerprint(CONFIG, [weights], cache_dir=cache) != first


def test_a_file_that_has_just_changed_is_not_remembered(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 10**18)
    files_fingerprint(CONFIG, [weights], cache_dir=tmp_path)
    assert json.loads((tmp_path / "fingerprints.json").read_text()) == {}


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', '{"x": "zz"}', "\ufffd"])
def test_a_damaged_memory_is_forgotten(weights: Path, tmp_path: Path, content: str) -> None:
    expected = files_fingerprint(CONFIG, [weights])
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "fingerprints.json").write_text(content)
    assert files_fingerprint(CONFIG, [weights], cache_dir=cache) == expected
    assert len(json.loads((cache / "fingerprints.json").read_text())) == 1


def test_a_memory_that_cannot_be_written_is_done_without(weights: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    expected = files_fingerprint(CONFIG, [weights])
    assert files_fingerprint(CONFIG, [weights], cache_dir=blocked / "cache") == expected


def test_a_file_that_is_gone_is_a_model_error(tmp_path: Path) -> None:
    with refused(ModelError):
        files_fingerprint(CONFIG, [tmp_path / "model.safetensors"])


def test_changed_weights_under_the_same_name_are_another_model(
    checkpoints: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), folder)
    first = find_model(str(folder), device="cpu").load().fingerprint
    assert find_model(str(folder), device="cpu").load().fingerprint == first
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert find_model(str(folder), device="cpu").load().fingerprint != first


@pytest.mark.parametrize("change", ["value", "swap", "config"])
def test_drawn_models_differ_by_weight_order_and_config(change: str) -> None:
    def make() -> torch.nn.Linear:
        layer = torch.nn.Linear(8, 4)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(32.0).view(4, 8))
            layer.bias.zero_()
        return layer

    before = parameters_fingerprint(CONFIG, make())
    assert parameters_fingerprint(CONFIG, make()) == before
    layer, config = make(), CONFIG
    with torch.no_grad():
        if change == "value":
            layer.weight[3, 3] += 1e-5
        elif change == "swap":
            layer.weight.copy_(layer.weight.flip(0))
        else:
            config = CONFIG | {"hidden_size": 65}
    assert parameters_fingerprint(config, layer) != before


@pytest.mark.e2e
def test_the_tiny_model_is_the_same_in_another_process() -> None:
    script = (
        "from tieredkv.engine.loader import find_model\n"
        "import sys; model = find_model('tiny-random', device='cpu').load()\n"
        "sys.stdout.write(model.fingerprint.hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert other.stdout == find_model("tiny-random", device="cpu").load().fingerprint.hex()


@pytest.mark.gpu
def test_a_model_drawn_on_the_device_is_the_same_in_another_process() -> None:
    script = (
        "from tieredkv.engine.loader import find_model\n"
        "import sys; sys.stdout.write(find_model('random:qwen3-0.6b').load().fingerprint.hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert other.stdout == find_model("random:qwen3-0.6b").load().fingerprint.hex()
