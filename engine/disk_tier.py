"""How a tier below host memory is opened for an engine, and the one that the product has: the disk.

`parts` chooses what is opened. Only this module and `store_options` know the store.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tieredkv.config import Settings
from tieredkv.engine.store_options import store_options
from tieredkv.operate.models import KnownModel, note_model
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.extents.space import minimum_budget_bytes
from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.options import BUSY_PATIENCE_S
from tieredkv.storage.starts import check_start
from tieredkv.tier import BackingTier
from tieredkv.types import DTYPE_BYTES, KVSpec
from tieredkv.wire.arena import HostArena


class OpenTier(NamedTuple):
    """A tier that serves one engine.

    Attributes:
        tier: what the engine uses.
        note_model: called once with the model, when it is loaded.
        rates_in: the folder in which learnt rates are kept, and a file that it has while the tier
            is there; None if they are not kept.
    """

    tier: BackingTier
    note_model: Callable[[KnownModel], object] = lambda _: None
    rates_in: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TierKind:
    """How a kind of tier is opened at `disk_dir`.

    Attributes:
        check: refuses settings, before anything takes long or much.
        least_bytes: returns the smallest `disk_size` that holds blocks of some bytes.
        open: opens the tier over the pages of host memory. The tier calls what it is given when
            there is something to poll, from any thread.
    """

    check: Callable[[Settings], object]
    least_bytes: Callable[[int], int]
    open: Callable[[Settings, KVSpec, HostArena, Callable[[], None]], OpenTier]


def _check(settings: Settings) -> None:
    assert settings.disk_dir is not None
    check_start(store_options(settings.disk_dir, settings), patience_s=BUSY_PATIENCE_S)


def _open(settings: Settings, spec: KVSpec, arena: HostArena, wake: Callable[[], None]) -> OpenTier:
    """Start the store's worker.

    Raises:
        StorageError: the folder is not usable; nothing in it was changed.
    """
    folder = settings.disk_dir
    assert folder is not None
    options = store_options(
        folder, settings, element_bytes=DTYPE_BYTES[spec.dtype], tells_blocks=True
    )
    store = StoreClient(options, arena, wake=wake)

    def note(model: KnownModel) -> None:
        note_model(folder, model)
        store.note_model(model)

    return OpenTier(store, note, rates_in=(folder, MARKER))


DISK = TierKind(_check, minimum_budget_bytes, _open)
