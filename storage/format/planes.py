"""Lossless compression of a block, in planes of bytes, with zstandard.

Plane i holds byte i of every element, and each plane is compressed on its own. The numbers of a
block have similar exponents and little else in common, so a plane that zstandard cannot shorten is
stored as it is. docs/format.md draws the bytes.

This module knows bytes in memory, not files. Any thread may call every function; the slow parts
release the interpreter lock.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError, frame_content_size

from tieredkv.storage.format.record import (
    CODEC_RAW,
    PACKED_HEADER_BYTES,
    Located,
    clear_codec,
    extent_bytes_for,
    is_encrypted,
    padded_bytes,
)
from tieredkv.types import BlockRecord

WIDTHS = {1: 2, 2: 4}  # codec -> bytes of an element
_LEVEL = 1  # 3 takes twice the time and makes exponents no smaller
_MOST_KEPT = 0.97  # a plane that stays larger is stored as it is, to save decoding time
_IS_RAW = 1 << 31
_NAMES = {CODEC_RAW: "raw", 1: "zstd of 2-byte planes", 2: "zstd of 4-byte planes"}
ReadBlock = Callable[[Located, memoryview], object]


class Packed(NamedTuple):
    """A compressed block: the image of its extent, and the payload within it.

    The header at the start of the image is not written yet.
    """

    image: memoryview
    payload: memoryview
    codec: int


def codec_name(number: int) -> str:
    """Name a codec for people."""
    name = _NAMES.get(clear_codec(number), f"codec {number}")
    return f"{name}, encrypted" if is_encrypted(number) else name


def aligned_buffer(size_bytes: int) -> memoryview:
    """Allocate anonymous memory that O_DIRECT accepts."""
    return memoryview(mmap.mmap(-1, size_bytes))


class _Thread(threading.local):
    """State of one thread: its zstandard contexts, and a buffer for what it reads."""

    def __init__(self) -> None:
        self.compress = ZstdCompressor(level=_LEVEL).compress
        self.decompress = ZstdDecompressor().decompress
        self.scratch = memoryview(b"")


_thread = _Thread()


def scratch(size_bytes: int) -> memoryview:
    """Return the calling thread's buffer for O_DIRECT, valid until the thread's next call.

    The buffer is reused, because new pages of memory cost time.
    """
    if len(_thread.scratch) < size_bytes:
        _thread.scratch = aligned_buffer(size_bytes)
    return _thread.scratch[:size_bytes]


class Rate:
    """Bytes of blocks handled per second of CPU time of a thread, averaged over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes, self._seconds = 0, 0.0

    @contextmanager
    def timing(self, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` and the CPU time that this thread spends in the `with` block."""
        begin = time.thread_time()
        yield
        with self._lock:
            self._num_bytes += num_bytes
            self._seconds += time.thread_time() - begin

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 as long as nothing was counted."""
        return self._num_bytes / (self._seconds or 1.0)


def pack(block: memoryview, number: int) -> Packed | None:
    """Compress a block with a codec; None if that does not save a sixteenth of its size."""
    size, width = len(block), WIDTHS[number]
    if size % width:
        return None
    pieces = []
    for column in np.frombuffer(block, np.uint8).reshape(-1, width).T:
        plane = np.ascontiguousarray(column)
        packed = np.frombuffer(_thread.compress(plane.data), np.uint8)
        pieces.append(packed if len(packed) <= _MOST_KEPT * len(plane) else plane)
    end = PACKED_HEADER_BYTES + 4 * width + sum(map(len, pieces))
    if end > size * 15 // 16:
        return None
    image = aligned_buffer(extent_bytes_for(end - PACKED_HEADER_BYTES, number, size))
    payload = image[PACKED_HEADER_BYTES:end]
    lengths = [len(piece) | (len(piece) == size // width) * _IS_RAW for piece in pieces]
    head = np.array(lengths, "<u4").view(np.uint8)
    np.concatenate([head, *pieces], out=np.frombuffer(payload, np.uint8))
    return Packed(image, payload, number)


def extent_bytes_of(record: BlockRecord, packed: Packed | None) -> int:
    """Return the bytes of the extent that a block needs, uncompressed if `packed` is None."""
    return len(packed.image) if packed else extent_bytes_for(record.size_bytes)


def unpack(payload: memoryview, number: int, into: memoryview) -> bool:
    """Decompress a payload into a page of exactly the block's size.

    Returns False, and writes nothing, if the payload does not hold a block of this size.
    """
    width, planes = WIDTHS[number], []
    size, start = len(into) // width, 4 * width
    try:
        for length in struct.unpack_from(f"<{width}I", payload):
            end = start + (length & ~_IS_RAW)
            piece: memoryview | bytes = payload[start:end]
            # NOTE: a frame may claim any size, and zstandard allocates what the frame claims.
            if not length & _IS_RAW and frame_content_size(piece) == size:
                piece = _thread.decompress(piece, allow_extra_data=False)
            planes.append(np.frombuffer(piece, np.uint8))
            start = end
    except (struct.error, ZstdError):
        return False
    if start != len(payload) or {size} != set(map(len, planes)) or len(into) % width:
        return False
    elements = np.frombuffer(into, f"<u{width}")
    elements[:] = planes.pop()
    while planes:
        elements <<= 8
        elements |= planes.pop()
    return True


class Packing:
    """Whether new blocks are compressed, and what a trial of `auto` has measured.

    Args:
        setting: `off`, `on`, or `auto`, which is on if `decide` finds that blocks load faster.
        element_bytes: size of the numbers in new blocks; a stored block names its own codec.
    """

    def __init__(self, setting: str, element_bytes: int) -> None:
        self.setting, self.is_on = setting, setting == "on"
        self.trial: dict[str, float] = {}
        self.rate = Rate()
        self._codec = element_bytes // 2

    def pack(self, block: memoryview) -> Packed | None:
        """Compress a block before it is stored; None if compression is off or saves too little."""
        if not self.is_on:
            return None
        with self.rate.timing(len(block)):
            return pack(block, self._codec)

    def decide(self, blocks: Sequence[Located], read_block: ReadBlock, num_readers: int) -> None:
        """Measure how fast stored blocks are read and decoded, and set `is_on` by the result.

        Raises:
            StorageError: a block is gone or cannot be read; then nothing is decided.
        """
        sizes = [located.record.size_bytes for located in blocks]
        pages = [aligned_buffer(padded_bytes(size)) for size in sizes]
        begin = time.perf_counter()
        with ThreadPoolExecutor(num_readers) as pool:
            list(pool.map(read_block, blocks, pages))
        read_s = time.perf_counter() - begin
        decoding, block_bytes, packed_bytes = Rate(), sum(sizes), 0
        for block in (page[:size] for page, size in zip(pages, sizes, strict=True)):
            packed = pack(block, self._codec)
            packed_bytes += len(packed.payload) if packed else len(block)
            if packed:
                with decoding.timing(len(block)):
                    unpack(packed.payload, packed.codec, block)
        self.trial = {
            "ratio": block_bytes / packed_bytes,
            "decode_rate": decoding.bytes_per_s,
            "read_rate": sum(located.payload_bytes for located in blocks) / read_s,
        }
        num_threads = min(num_readers, len(os.sched_getaffinity(0)))
        self.is_on = pays(**self.trial, num_threads=num_threads)


def pays(ratio: float, decode_rate: float, read_rate: float, num_threads: int) -> bool:
    """Return whether loads get a tenth faster if decoding takes half of the threads' time."""
    return min(read_rate * ratio, decode_rate * num_threads / 2) > 1.1 * read_rate
