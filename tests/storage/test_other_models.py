"""Blocks of another model on disk are counted after a start, since no request can use them."""

from pathlib import Path
from threading import Event

from tests.storage import conftest
from tests.storage.blocks import digest, make_record, open_store, put
from tests.storage.conftest import Harness, Mailbox
from tests.waiting import wait_until
from tieredkv.clock import Clock
from tieredkv.hashing import ModelIdentity
from tieredkv.storage.worker.steps import count_others
from tieredkv.types import BlockRecord

NOW = Clock().now()
TENANTS = [digest("tenant"), digest("other")]


def model_of(fingerprint: str) -> ModelIdentity:
    return ModelIdentity(
        fingerprint=fingerprint, dtype="float32", block_size=16, hash_algo="sha256"
    )


OURS, EARLIER = model_of("aa" * 32), model_of("bb" * 32)


def blocks_of(model: ModelIdentity, count: int) -> list[BlockRecord]:
    """Return blocks of a model, of both tenants in turns."""
    names = [(f"{model.fingerprint}/{n}", TENANTS[n % 2]) for n in range(count)]
    return [
        make_record(name, now=NOW, namespace=tenant, root=model.root(tenant))
        for name, tenant in names
    ]


def test_blocks_whose_root_is_not_the_models_count(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", Clock(), budget_bytes=16 << 20) as store:
        put(store, *blocks_of(OURS, 300), *blocks_of(EARLIER, 7))

        def count(model: ModelIdentity, now: float = NOW) -> int | None:
            return count_others(store.index, model, now, Event())

        assert count(OURS) == 7
        assert count(EARLIER) == 300
        assert count(model_of("cc" * 32)) == 307
        assert count(OURS, NOW + 90_000) == 0, "all of them have expired"
        is_over = Event()
        is_over.set()
        assert count_others(store.index, OURS, NOW, is_over) is None


def test_each_worker_tells_the_blocks_of_other_models_once_the_model_is_known(
    harness: Harness,
) -> None:
    root, size = OURS.root(conftest.NAMESPACE), conftest.PAGE_BYTES
    client = harness.open()
    mail = Mailbox(client)
    mail.store([make_record(f"{n}", now=NOW, size_bytes=size, root=root) for n in range(3)])
    assert client.stats().num_other_model is None
    client.note_model(EARLIER)
    wait_until(lambda: client.stats().num_other_model == 3)
    client.give_up("is killed by a test")
    wait_until(lambda: client.pid is None)
    wait_until(lambda: client.pid is not None)
    wait_until(lambda: client.stats().num_other_model == 3)
