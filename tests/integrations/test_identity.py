"""What tells the chunks of one model from those of another, and how old a copy of one is."""

from pathlib import Path

import pytest

from tests.golden import refused
from tieredkv.errors import ConfigError
from tieredkv.integrations import identity
from tieredkv.integrations.ages import Ages
from tieredkv.integrations.identity import Identity, weights_identity


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, which has one snapshot of one model."""
    monkeypatch.setattr(identity, "CACHE_DIR", tmp_path / "digests")
    monkeypatch.setattr(identity, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshots = tmp_path / "hub" / "models--org--name" / "snapshots"
    make_model(snapshots / "first", b"one")
    return snapshots


def make_model(folder: Path, weights: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / name).write_bytes(weights)
    return folder


def test_weights_in_a_folder_and_in_the_hubs_cache_are_the_same(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", b"one")
    known = weights_identity(str(folder), None, "full")
    assert weights_identity("org/name", None, "full") == known
    assert weights_identity("anything", str(folder), "full") == known
    (folder / "model.safetensors").write_bytes(b"two")
    assert weights_identity(str(folder), None, "full") != known


def test_of_several_snapshots_none_is_taken_for_the_one_that_is_served(hub: Path) -> None:
    make_model(hub / "second", b"two")
    with refused(ConfigError):
        weights_identity("org/name", None, "full")


def test_weights_of_other_formats_count_as_well(tmp_path: Path) -> None:
    one = make_model(tmp_path / "a", b"one", "pytorch_model.bin")
    two = make_model(tmp_path / "b", b"two", "pytorch_model.bin")
    assert weights_identity(str(one), None, "full") != weights_identity(str(two), None, "full")


def test_a_path_at_which_nothing_is_gives_the_same_answer() -> None:
    with refused(ConfigError):
        weights_identity("/no/such/folder", None, "full")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", b"one")
    (folder / "config.json").unlink()
    with refused(ConfigError):
        weights_identity(str(folder), None, "full")


def test_a_chunk_is_named_by_engine_facts_tenant_and_key() -> None:
    first = Identity("vllm", {"dtype": "bfloat16"})
    others = (Identity("vllm", {"dtype": "float16"}), Identity("other", first.facts))
    root = first.root("tenant")
    assert root == Identity("vllm", {"dtype": "bfloat16"}).root("tenant")
    assert len({root, first.root(""), *(each.root("tenant") for each in others)}) == 4
    assert first.block_hash(root, b"a") != first.block_hash(root, b"b")
    # Golden: chunks that are stored must be found by later versions, too.
    assert root.hex()[:16] == "9eb9e1c707484180"
    assert first.block_hash(root, b"a").hex()[:16] == "36b25fe4b4e8fc59"


def test_the_first_offer_of_a_key_counts_until_it_is_forgotten() -> None:
    ages = Ages(2)
    assert ages.note(b"a", 10.0) == 10.0
    assert ages.note(b"a", 20.0) == 10.0
    assert ages.note(b"a", 5.0) == 5.0, "a stored copy is older"
    ages.forget(b"a")
    assert ages.note(b"a", 30.0) == 30.0
    ages.note(b"b", 31.0)
    ages.note(b"a", 32.0)
    ages.note(b"c", 33.0)  # the key that was not offered for longest is forgotten
    assert ages.note(b"a", 40.0) == 30.0
    assert len(ages) == 2
