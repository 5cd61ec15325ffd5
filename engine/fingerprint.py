"""Identify a model by a digest of its config, its weights' bytes and its modelling code.

Changed weights under the same name give another fingerprint, so that nothing computed by other
weights is ever hit. The code counts by version: a release of transformers may correct how a model
computes its keys and values. The versions of torch, the GPU and the choice of a kernel do not
count: they change how results are rounded, as other batch sizes do. The module knows files and
parameters, not how a model is built.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import __version__ as transformers_version

from tieredkv.config import Fingerprint
from tieredkv.errors import ModelError
from tieredkv.types import Progress, ignore_progress, tracked

logger = logging.getLogger(__name__)

_FORMAT = b"tieredkv/fingerprint/2"
_OWN_CODE = "1"
"""Raised when `engine.fused` or the kernels compute something else, beyond rounding."""

_PIECE_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = 64
CACHE_DIR = Path("~/.cache/tieredkv")
"""Where the digests of weight files are remembered."""

_CACHE_FILE = "fingerprints.json"
_NUM_CHECKSUM_WORDS = 1 << 24
_SETTLED_NS = 2_000_000_000
"""The coarsest clock that a filesystem stamps its files by, FAT's."""

_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

_IRRELEVANT_KEYS = frozenset(
    {
        *("_name_or_path", "_commit_hash", "_attn_implementation", "transformers_version"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "output_attentions"),
        *("output_hidden_states", "id2label", "label2id", "bos_token_id", "eos_token_id"),
        *("attention_dropout", "initializer_range"),
    }
)
"""Config keys that say nothing, in any family, about the keys and values that a model computes."""


def config_digest(config: Mapping[str, Any]) -> bytes:
    """Digest the config keys that may decide a model's keys and values, rope settings included."""
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT_KEYS}
    text = json.dumps(relevant, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).digest()


def _code_version() -> bytes:
    """Name the code that computes keys and values."""
    return f"transformers {transformers_version}, tieredkv {_OWN_CODE}".encode()


def files_fingerprint(
    config: Mapping[str, Any],
    weight_files: Sequence[Path],
    *,
    mode: Fingerprint = "full",
    cache_dir: Path | None = None,
    progress: Progress = ignore_progress,
) -> bytes:
    """Digest a checkpoint: its config and its weight files, whole or in samples.

    Args:
        config: the model's config as a dictionary.
        weight_files: the safetensors files from which the model is loaded.
        mode: `full` reads every byte; `sample` reads sizes, headers and pieces of each file, and
            can miss a change between the pieces.
        cache_dir: folder that remembers a file's digest by its `file_state`; None or an unwritable
            one means that it is computed again. Files that changed within the last two seconds
            are not remembered.
        progress: called with the number of pieces that have been read.

    Raises:
        ModelError: a weight file cannot be read.
    """
    files = sorted(weight_files)
    try:
        digests = _digests(files, mode, cache_dir, progress)
    except OSError as error:
        what = f"`{error.filename}` cannot be read: {error.strerror}"
        raise ModelError(f"the weights cannot be identified: {what}") from error
    parts = [_FORMAT, _code_version(), mode.encode(), config_digest(config)]
    for path, digest in zip(files, digests, strict=True):
        parts += [path.name.encode(), digest]
    return _digest_parts(parts)


def parameters_fingerprint(config: Mapping[str, Any], model: nn.Module) -> bytes:
    """Digest a model with random weights by checksums that are computed on its device.

    The digest is equal in every process that draws equal weights.
    """
    names, sums = [], []
    for name, parameter in model.named_parameters():
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        sums.append(_checksum(parameter.detach()))
    values = torch.stack(sums).cpu().numpy().astype("<i8").tobytes()
    return _digest_parts(
        [_FORMAT, _code_version(), b"drawn", config_digest(config), *names, values]
    )


def _digest_parts(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _digests(
    files: Sequence[Path], mode: Fingerprint, cache_dir: Path | None, progress: Progress
) -> list[bytes]:
    remembered = {} if cache_dir is None else _read_cache(cache_dir)
    keys = {path: f"{mode}|{file_state(path)}" for path in files}
    unknown = {path: path.stat().st_size for path in files if keys[path] not in remembered}
    places = [place for path, size in unknown.items() for place in _pieces(path, size, mode)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        digests = pool.map(_piece_digest, places)
        told = tracked(progress, "fingerprinting weights", places) if unknown else ()
        pieces = [(path, next(digests)) for path, *_ in told]
    for path, size in unknown.items():
        if f"{mode}|{file_state(path)}" != keys[path]:
            raise ModelError(f"`{path}` changed while it was read; load the model again")
        own = (digest for of, digest in pieces if of == path)
        remembered[keys[path]] = _digest_parts([size.to_bytes(8, "little"), *own]).hex()
    known = [bytes.fromhex(remembered[key]) for key in keys.values()]
    for path in unknown:
        if not _has_settled(path):
            del remembered[keys[path]]
    if unknown and cache_dir is not None:
        _write_cache(cache_dir, remembered)
    return known


Piece = tuple[Path, int, int]
"""A file, an offset in it, and the largest number of bytes to read there."""


def _pieces(path: Path, size: int, mode: Fingerprint) -> list[Piece]:
    """Return the pieces to digest: the whole file, or its header and samples spread over it.

    The header has the names, dtypes and shapes of all tensors.
    """
    if mode == "full":
        return [(path, offset, _PIECE_BYTES) for offset in range(0, size, _PIECE_BYTES)]
    with path.open("rb") as file:
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
    last = max(0, size - _SAMPLE_BYTES)
    spread = (last * i // _NUM_SAMPLES for i in range(_NUM_SAMPLES + 1))
    samples = [(path, offset, _SAMPLE_BYTES) for offset in spread]
    return [(path, 0, min(header_bytes, size)), *samples]


def _piece_digest(piece: Piece) -> bytes:
    path, offset, size_bytes = piece
    with path.open("rb", buffering=0) as file:
        return hashlib.sha256(os.pread(file.fileno(), size_bytes, offset)).digest()


def file_state(path: Path) -> str:
    """Return what tells a file from every other one and from itself with other bytes.

    The time of the last change of the inode is part of it: unlike that of the last write, which
    `cp -p` and `rsync -t` keep, no program can set it.
    """
    try:
        it = path.stat()
    except OSError as error:
        return f"{path}|{error}"
    times = f"{it.st_mtime_ns}|{it.st_ctime_ns}"
    return f"{path.resolve()}|{it.st_dev}|{it.st_ino}|{it.st_size}|{times}"


def _has_settled(path: Path) -> bool:
    """Whether a further change would surely give the file another time of its last change."""
    return time.time_ns() - path.stat().st_ctime_ns > _SETTLED_NS


def _read_cache(cache_dir: Path) -> dict[str, str]:
    """Read the remembered digests; a missing or malformed file counts as empty."""
    try:
        return msgspec.json.decode((cache_dir / _CACHE_FILE).read_bytes(), type=dict[str, _Hex])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write_cache(cache_dir: Path, remembered: Mapping[str, str]) -> None:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = cache_dir / f"{_CACHE_FILE}.{os.getpid()}"
        partial.write_text(json.dumps(dict(remembered), indent=0))
        partial.replace(cache_dir / _CACHE_FILE)
    except OSError as error:
        logger.info("fingerprints of weights cannot be kept in `%s`: %s", cache_dir, error)


def _checksum(parameter: Tensor) -> Tensor:
    """Sum a parameter's 16-bit words, plain and weighted by position, in wrapping 64-bit integers.

    Integer sums do not depend on the order in which a device adds.

    Returns:
        [2] int64 on the parameter's device.
    """
    words = parameter.contiguous().view(-1).view(torch.int16)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _NUM_CHECKSUM_WORDS):
        part = words[start : start + _NUM_CHECKSUM_WORDS].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=part.device)
        weight = (position * 0x2545F4914F6CDD1D) | 1
        sums += torch.stack([part.sum(), (part * weight).sum()])
    return sums
