"""`prune` and `evict` drop blocks of other models, and `verify --sample` reads a part."""

from pathlib import Path

from tests.golden import refused
from tests.operate.test_ask import engine_that_says
from tests.storage.blocks import make_record, open_store, put, told_by_engine
from tests.storage.conftest import Harness, Mailbox, make_chain
from tieredkv.cli.store import parse_part
from tieredkv.clock import Clock
from tieredkv.errors import ConfigError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Inspect, Ls, Prune, Verify
from tieredkv.operate.models import KnownModel, note_model
from tieredkv.types import BlockRecord, Tier

NOW = Clock().now()
NAMESPACE = b"n" * 32


def model(name: str) -> KnownModel:
    return KnownModel(
        name=name,
        fingerprint=name.encode().hex() * 8,
        dtype="float32",
        block_size=16,
        hash_algo="sha256",
    )


def chain(name: str, of: KnownModel, length: int, **changes: object) -> list[BlockRecord]:
    """Return the records of a chain of a model."""
    how = {"root": of.root(NAMESPACE), "namespace": NAMESPACE, "size_bytes": 100, **changes}
    return [make_record(name, position, now=NOW, **how) for position in range(length)]


def fill(folder: Path, *records: BlockRecord) -> None:
    with open_store(folder, Clock(), budget_bytes=64 << 20) as store:
        put(store, *records)


def left(control: StoreControl) -> int:
    """Return how many blocks `ls` lists."""
    return sum(each.blocks for page in control.pages(Ls()) for each in page)


def test_expired_blocks_orphans_and_other_models_go(tmp_path: Path) -> None:
    folder, used, old = tmp_path / "s", model("used"), model("old!")
    hole = chain("hole", used, 6)
    del hole[2]
    expired = chain("short", used, 2, expires_at=NOW + 1000)
    fill(folder, *chain("whole", used, 3), *hole, *expired, *chain("other", old, 4))
    for each in (used, old):
        note_model(folder, each)
    (tmp_path / "offset").write_text("2000")
    control = StoreControl(folder, clock_offset_file=str(tmp_path / "offset"))
    would = control.answer(Prune(model="used", dry_run=True))
    by_reason = would["by_reason"]
    # The worker that answers also sweeps: what has expired may be gone already.
    assert by_reason.pop("expired", 2) == 2
    assert by_reason == {"orphan": 3, "other_model": 4}
    assert would["freed_bytes"] > 0 and control.answer(Df())["disk"]["blocks"] >= 12
    done = control.answer(Prune())
    assert done["by_reason"].get("orphan") == 3 and "other_model" not in done["by_reason"]
    assert left(control) == 3 + 2 + 4
    assert control.answer(Prune(model="used"))["by_reason"] == {"other_model": 4}
    assert left(control) == 3 + 2
    assert control.answer(Prune(model="used"))["pruned_blocks"] == 0
    assert control.answer(Verify())["bad"] == 0


def test_a_model_that_the_store_does_not_know_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "s", *chain("a", model("a"), 2))
    note_model(tmp_path / "s", model("a"))
    control = StoreControl(tmp_path / "s")
    with refused(ConfigError):
        control.answer(Prune(model="b"))
    assert left(control) == 2


def test_the_chains_of_a_model_are_evicted_by_any_name(tmp_path: Path) -> None:
    folder, mine, other = tmp_path / "s", model("a,tier=disk \u00e9"), model("a")
    fill(folder, *chain("one", mine, 3), *chain("two", mine, 2), *chain("other", other, 4))
    for each in (mine, other):
        note_model(folder, each)
    control = StoreControl(folder)
    few = control.answer(EvictFilter(model=mine.name, filter="blocks<3", dry_run=True))
    assert few["evicted_blocks"] == 2
    assert control.answer(EvictFilter(model="nobody's"))["evicted_blocks"] == 0
    assert control.answer(EvictFilter(model=mine.name, filter="blocks>3"))["evicted_blocks"] == 0
    with refused(ConfigError):
        control.answer(EvictFilter(model=mine.name, ids=("0" * 8,)))
    assert control.answer(EvictFilter(model=mine.name))["evicted_blocks"] == 3 + 2
    assert left(control) == 4


def test_a_parent_in_ram_makes_no_orphan(harness: Harness) -> None:
    blocks = make_chain("a", 5)
    client = harness.open()
    Mailbox(client).store([*blocks[:1], *blocks[2:]])
    control = StoreControl(harness.folder)
    with engine_that_says(client, told_by_engine((blocks[1], [Tier.HOST]))):
        assert control.answer(Prune())["pruned_blocks"] == 0
    with engine_that_says(client, told_by_engine((blocks[3], [Tier.DEVICE]))):
        assert control.answer(Prune())["by_reason"] == {"orphan": 1}
    client.close()
    names = [each.block_hash for each in blocks]
    [page] = control.pages(Inspect(names=tuple(names)))
    assert [each.position for each in page] == [0, 3, 4]


def test_a_sample_of_the_blocks_is_verified(tmp_path: Path) -> None:
    fill(tmp_path / "s", *chain("a", model("a"), 60))
    control = StoreControl(tmp_path / "s")
    assert control.answer(Verify())["checked"] == 60
    assert 0 < control.answer(Verify(sample=0.5))["checked"] < 60
    for part in (0.0, 1.5, -1.0):
        with refused(ConfigError):
            control.answer(Verify(sample=part))
    assert [parse_part(text) for text in ("5%", "0.05", "100%", " 50% ")] == [0.05, 0.05, 1.0, 0.5]
