"""What the chunks of another engine are: roots and hashes from all that may decide their bytes.

    root        = H("tieredkv/1", engine, facts, namespace)
    block hash  = H(root, the engine's own key of the chunk)

The key stands for the tokens and for what the engine counts as part of them, such as a salt or the
name of an adapter. The facts stand for everything else. What the engine does not tell is not among
them: the bytes of adapters, and how the weights were changed while they were loaded.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name

from tieredkv.config import Fingerprint
from tieredkv.engine.fingerprint import CACHE_DIR, files_fingerprint
from tieredkv.errors import ConfigError, ModelError
from tieredkv.hashing import IDENTITY_VERSION, namespace_digest

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Kinds of weight files; those of the first kind that a folder has are the model's."""


def _hasher(*parts: bytes) -> "hashlib._Hash":
    hasher = hashlib.sha256()
    for part in (IDENTITY_VERSION, *parts):
        hasher.update(_counted(part))
    return hasher


def _counted(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


@functools.lru_cache(maxsize=64)
def _chunk_hasher(root: bytes) -> "hashlib._Hash":
    """Return what has taken in all but the key of a tenant's chunks, to be copied for each."""
    return _hasher(b"chunk", root)


@dataclass(frozen=True, slots=True)
class Identity:
    """Names chunks of one engine.

    Args:
        engine: what made the chunks.
        facts: everything known that may decide their bytes, in plain values.
    """

    engine: str
    facts: Mapping[str, Any]

    def root(self, tenant: str) -> bytes:
        """Return what all chunks of a tenant have in common."""
        facts = json.dumps(self.facts, sort_keys=True, separators=(",", ":"))
        namespace = namespace_digest(tenant)
        return _hasher(b"root", self.engine.encode(), facts.encode(), namespace).digest()

    def block_hash(self, root: bytes, key: bytes) -> bytes:
        """Return the name of a chunk that the engine knows by `key`."""
        hasher = _chunk_hasher(root).copy()
        hasher.update(_counted(key))
        return hasher.digest()


def weights_identity(model: str, weights: str | None, how: Fingerprint) -> str:
    """Return the fingerprint of a model's weights, in hex digits.

    Args:
        model: a folder with a checkpoint, or a hub id.
        weights: another folder that holds the weights; None for the model's own.
        how: whether all bytes of the weights count, or a sample.

    Raises:
        ConfigError: no weights are found, so that nobody could tell whose chunks are stored.
    """
    folder = _folder(weights or model)
    for pattern in _WEIGHTS:
        if folder is not None and (files := sorted(folder.glob(pattern))):
            break
    else:
        raise ConfigError(
            f"the weights of `{weights or model}` are not found, or in several versions, so that "
            "chunks of other weights could not be told from theirs\nhint: give their folder as "
            "`weights`, or a text that changes whenever they do as `weights_id`"
        )
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{folder}/config.json` cannot be read: {error}") from error
    try:
        cache = CACHE_DIR.expanduser()
        return files_fingerprint(config, files, mode=how, cache_dir=cache).hex()
    except ModelError as error:
        raise ConfigError(str(error)) from error


def known_weights(model: str, weights: str | None, weights_id: str | None, how: Fingerprint) -> str:
    """Return all that identifies a model's weights: their fingerprint and the operator's text.

    Args:
        model: as in `weights_identity`.
        weights: as well.
        how: as well.
        weights_id: what the operator says; it stands alone where the model has no weights that can
            be found.

    Raises:
        ConfigError: neither is known, or `weights` is wrong.
    """
    if not weights_id:
        return weights_identity(model, weights, how)
    try:
        return f"{weights_identity(model, weights, how)}, {weights_id}"
    except ConfigError:
        if weights is not None:
            raise
        return weights_id


def _folder(model: str) -> Path | None:
    """Return the folder of a model: its own, or the one snapshot of it in the hub's cache.

    Of several snapshots nobody here knows which one is served, so that none is taken.
    """
    if (folder := Path(model).expanduser()).is_dir():
        return folder
    try:
        name = repo_folder_name(repo_id=model, repo_type="model")
    except HFValidationError:  # a path, of which nothing is there
        return None
    snapshots = [*(Path(HF_HUB_CACHE) / name / "snapshots").glob("*")]
    return snapshots[0] if len(snapshots) == 1 else None
