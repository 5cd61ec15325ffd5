"""Keeps the measured rates across restarts, in a file in the store's folder.

What is read is a first assumption: the first measurements replace it. A file of another machine,
disk or model is ignored, and so is one that is damaged or absurd. Step times that are far from what
was measured at the start are ignored, and the links' rates are taken all the same: a machine that
is busy for a while computes slower, and its disk is the one it was.
"""

import logging
import os
import threading
import time
from typing import Annotated, Any, Literal

import msgspec

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.step_times import Step
from tieredkv.own_files import read_own, replace_own

logger = logging.getLogger(__name__)

NAME = "rates.json"
SAVE_S = 60.0
"""While steps are computed, the file is written again so often."""

CLOSE_S = 1.0
"""At the end, a disk that hangs is not waited for any longer."""

MOST_BYTES = 1 << 20

_BytesPerS = Annotated[float, msgspec.Meta(ge=1e3, le=1e13)]
_Tokens = Annotated[float, msgspec.Meta(ge=1, le=1 << 30)]
_Pairs = Annotated[float, msgspec.Meta(ge=0, le=1 << 60)]
_Seconds = Annotated[float, msgspec.Meta(ge=1e-6, le=1e4)]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What rates were measured on, and with which model.

    Attributes:
        device: the GPU, or the number of processors.
        disk: number of the device that the store's folder lies on.
        model: the model's name, for people.
        fingerprint: the model's fingerprint in hex.
        block_bytes: bytes of a block.
    """

    device: str
    disk: str
    model: str
    fingerprint: str
    block_bytes: int


class SavedRates(msgspec.Struct, kw_only=True):
    """The content of the file; a rate that was never measured is None.

    Attributes:
        steps: of each kind of step its tokens, its pairs of tokens, its seconds, and the tokens
            that it read.
    """

    format: Literal["tieredkv-rates/1"] = "tieredkv-rates/1"
    machine: Machine
    read_bytes_per_s: _BytesPerS | None = None
    write_bytes_per_s: _BytesPerS | None = None
    up_bytes_per_s: _BytesPerS | None = None
    steps: Annotated[
        list[tuple[_Tokens, _Pairs, _Seconds, _Pairs]], msgspec.Meta(max_length=4096)
    ] = []

    @property
    def known_steps(self) -> list[Step]:
        """The steps as `ComputeRate.assume` takes them."""
        return [Step(*each) for each in self.steps]


def disk_name(folder: str) -> str:
    """Name the device that a folder lies on.

    Raises:
        OSError: it cannot be told.
    """
    number = os.stat(folder).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def read_rates(folder: str) -> SavedRates | None:
    """Read the file of a store's folder; None if there is none.

    Raises:
        OSError: it cannot be read, or is no regular file of this user.
        ValueError: it is damaged or absurd.
    """
    try:
        return parse_rates(read_own(os.path.join(folder, NAME), MOST_BYTES))
    except FileNotFoundError:
        return None


def parse_rates(text: bytes) -> SavedRates:
    """Read the content of such a file.

    Raises:
        ValueError: it is damaged or absurd.
    """
    if len(text) > MOST_BYTES:
        raise ValueError("it is too long")
    try:
        return msgspec.json.decode(text, type=SavedRates)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


class RateFile:
    """The rates of one engine and their file.

    The engine's thread calls it and never waits for the disk, except in the constructor and up to
    `CLOSE_S` in `close`: a thread of its own writes the file.

    Args:
        folder: the store's folder.
        mark: name of a file that the folder has while there is a store in it; the rates are written
            only then.
        machine: what the rates belong to.
        read, write, up, compute: the rates; those of the file are their first assumption.
    """

    def __init__(
        self,
        folder: str,
        machine: Machine,
        *,
        mark: str,
        read: LinkRate,
        write: LinkRate,
        up: LinkRate,
        compute: ComputeRate,
    ) -> None:
        self._folder, self._mark, self._machine = os.path.abspath(folder), mark, machine
        self._links = {"read": read, "write": write, "up": up}
        self._compute = compute
        self._saved = SavedRates(machine=machine)
        self._written = b""
        self._has_failed = False
        self._due_at = time.monotonic() + SAVE_S
        self._thread: threading.Thread | None = None
        try:
            if (found := read_rates(self._folder)) is not None:
                self._take(found)
        except (OSError, ValueError) as error:
            self._ignore(str(error), logging.WARNING)

    def _take(self, found: SavedRates) -> None:
        if found.machine != self._machine:
            self._ignore("it is of another machine, disk or model")
            return
        self._saved = found
        for name, link in self._links.items():
            if link.is_learnt:  # what was measured at this start counts more
                continue
            if bytes_per_s := getattr(found, f"{name}_bytes_per_s"):
                link.assume(bytes_per_s)
        if not self._compute.assume(found.known_steps):
            self._ignore("they are far from what was measured now", what="step times")

    def _ignore(self, why: str, level: int = logging.INFO, *, what: str = "rates") -> None:
        path = os.path.join(self._folder, NAME)
        logger.log(level, "the %s of an earlier run in `%s` are ignored: %s", what, path, why)

    def keep(self) -> None:
        """Have the file written if that is due."""
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + SAVE_S
            self._save()

    def close(self) -> None:
        """Write the file; wait a bounded time until it is there."""
        self._save()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _save(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        known: dict[str, Any] = {
            field: link.bytes_per_s if link.is_learnt else getattr(self._saved, field)
            for field, link in ((f"{name}_bytes_per_s", link) for name, link in self._links.items())
        }
        rates = SavedRates(
            machine=self._machine, **known, steps=[(*it,) for it in self._compute.steps]
        )
        text = msgspec.json.encode(rates) + b"\n"
        if text != self._written:
            self._thread = threading.Thread(
                target=self._write, args=(text,), name="tieredkv-rates", daemon=True
            )
            self._thread.start()

    def _write(self, text: bytes) -> None:
        try:
            folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.stat(self._mark, dir_fd=folder_fd)  # an unmounted store leaves an empty folder
                replace_own(NAME, text, dir_fd=folder_fd)
            finally:
                os.close(folder_fd)
            self._written = text
        except OSError as error:
            if not self._has_failed:
                logger.warning("rates cannot be kept in `%s`: %s", self._folder, error)
            self._has_failed = True
