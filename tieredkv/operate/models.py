"""The models whose blocks a store has or had, in a file in its folder, so that chains have names.

A block's root is a digest of the model's fingerprint among others. The file has what the roots of a
model are made of. Without it, or without a model in it, chains are listed without name and tokens.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tieredkv.hashing import ModelIdentity, windows_of
from tieredkv.own_files import read_own, replace_own
from tieredkv.types import window_blocks

logger = logging.getLogger(__name__)

NAME = "models.json"
MOST_MODELS = 64
MOST_BYTES = 1 << 20


class AnchorNeeds(NamedTuple):
    """What has to be there, besides the blocks, where a request is to go on behind a block.

    Attributes:
        num_blocks: of how many of the last blocks the pages of windows are needed.
        num_pages: how many these are of each block.
    """

    num_blocks: int
    num_pages: int


class KnownModel(ModelIdentity, frozen=True, kw_only=True):
    """One model.

    Attributes:
        name: for people.
    """

    name: str

    @property
    def anchor_needs(self) -> AnchorNeeds | None:
        """What a request needs of the windows to go on; None of a model without windows."""
        if not (windows := windows_of(self.layout)):
            return None
        return AnchorNeeds(window_blocks(max(windows), self.block_size), len(windows))


class KnownModels:
    """Tells whose a chain is.

    Args:
        models: as `read_models` returns them.
    """

    def __init__(self, models: Sequence[KnownModel]) -> None:
        self._models = models
        self._of_root: dict[bytes, KnownModel | None] = {}

    @property
    def names(self) -> list[str]:
        """The names of all known models."""
        return sorted({model.name for model in self._models})

    def of(self, root: bytes, namespace: bytes) -> KnownModel | None:
        """Return the model of a chain; None if it is not known."""
        if root not in self._of_root:
            models = (model for model in self._models if model.root(namespace) == root)
            self._of_root[root] = next(models, None)
        return self._of_root[root]

    def name_of(self, root: bytes, namespace: bytes) -> str | None:
        """Return the name of a chain's model; None if it is not known."""
        model = self.of(root, namespace)
        return model.name if model else None


def read_models(folder: str | Path) -> list[KnownModel]:
    """Read the file in a store's folder; models that cannot be read are not known.

    Root reads that of the folder's owner, as it looks at stores of others.
    """
    try:
        owner = None if os.geteuid() else os.stat(folder).st_uid
        data = read_own(os.path.join(folder, NAME), MOST_BYTES, owner=owner)
        return msgspec.json.decode(data, type=list[KnownModel])
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("`%s` in `%s` cannot be read: %s", NAME, folder, error)
    return []


def note_model(folder: str | Path, model: KnownModel) -> None:
    """Add a model to the file; where that fails, its chains have no name."""
    known = [each for each in read_models(folder) if each != model]
    text = msgspec.json.encode([*known, model][-MOST_MODELS:]) + b"\n"
    try:
        replace_own(os.path.join(folder, NAME), text)
    except OSError as error:
        logger.warning("`%s` in `%s` cannot be written: %s", NAME, folder, error)
