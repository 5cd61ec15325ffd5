"""A disk that fails on demand: a FUSE filesystem in plain Python that shows another folder.

A test mounts it with `FaultyDisk`. Run as a script, this file is the server of the filesystem. It
needs only `/dev/fuse` and the right to mount, not libfuse or fusermount. The structures and numbers
of the protocol are those of `linux/fuse.h`, version 7.31. Requests that are not handled are
answered with ENOSYS.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

_HEADER = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_REPLY = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIIIHHIIHHII6I")
_ATTRIBUTES = struct.Struct("<6Q10I")
_OPENED = struct.Struct("<QII")
_IO = struct.Struct("<QQIIQII")  # handle, offset, size, flags, lock owner, flags, padding
_SETATTR = struct.Struct("<IIQQQQQQ8I")
_ENTRY = struct.Struct("<QQI")
_MAX_WRITE = 1 << 20
_ROOT = 1
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_DIRECT_IO = 1  # in the answer to an open: keep this file out of the page cache
_SET_MODE, _SET_SIZE, _SET_TIMES, _HAS_HANDLE = 1, 8, 16 | 32, 64
_MNT_DETACH = 2
_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(slots=True)
class Faults:
    """The faults of the disk at the moment.

    Attributes:
        only: End of the names of the files that are affected; empty for all files.
        fail_reads, fail_writes: The errno with which reads and writes fail, or 0. Allocating counts
            as writing.
        fail_from: Reads that begin before this byte succeed in any case.
        room_bytes: How many bytes can be written or allocated before ENOSPC; None for no limit.
        hold_reads: How many of the next reads hang until the faults are changed.
        hold_syncs: Whether every sync hangs until the faults are changed.
        lifted: Set when other faults replace these.
    """

    only: str = ""
    fail_reads: int = 0
    fail_writes: int = 0
    fail_from: int = 0
    room_bytes: int | None = None
    hold_reads: int = 0
    hold_syncs: bool = False
    lifted: threading.Event = field(default_factory=threading.Event)


class Passthrough:
    """The server, which answers the kernel's requests from the files of a folder.

    Up to 64 requests are answered at once, each by a thread. A node is an O_PATH descriptor, and
    its number is that of the inode, so a rename or unlink does not change it. Nodes live as long as
    the server.
    """

    def __init__(self, device: int, folder: str) -> None:
        self._device = device
        self._nodes = {_ROOT: os.open(folder, os.O_PATH)}
        self._faults = Faults()
        self._num_hits = 0  # requests held or failed since the faults were last changed
        self._lock = threading.Lock()
        self._handlers: dict[int, Callable[[int, memoryview], bytes]] = {
            1: self._lookup,
            3: self._getattr,
            4: self._setattr,
            8: self._mknod,
            9: self._mkdir,
            10: self._unlink,
            11: self._rmdir,
            12: lambda node, body: self._rename(node, body, 8),
            14: self._open,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._fsync,
            26: self._init,
            27: lambda node, body: bytes(_OPENED.size),  # open a folder: nothing to remember
            28: self._readdir,
            29: lambda node, body: b"",
            35: self._create,
            43: self._fallocate,
            45: lambda node, body: self._rename(node, body, 16),
            51: self._tmpfile,
        }

    def serve(self, control: socket.socket) -> NoReturn:
        """Answer requests until the test closes its end; the kernel then fails open requests."""
        threading.Thread(target=self._take_requests, daemon=True).start()
        for line in control.makefile():
            wanted = json.loads(line)
            with self._lock:
                num_hits = self._num_hits
                if wanted is not None:
                    self._faults.lifted.set()
                    self._faults, self._num_hits = Faults(**wanted), 0
            control.sendall(b"%d\n" % num_hits)
        os._exit(0)

    def _take_requests(self) -> None:
        with ThreadPoolExecutor(64) as threads:
            while True:
                try:
                    request = os.read(self._device, _MAX_WRITE + 4096)
                except OSError as error:
                    if error.errno in (errno.EINTR, errno.ENOENT):  # its process has given it up
                        continue
                    return  # unmounted
                threads.submit(self._answer, request)

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        if opcode in (2, 36, 42):  # forget, interrupt: no answer is expected
            return
        code, answer = 0, b""
        try:
            handler = self._handlers.get(opcode)
            if handler is None:
                raise OSError(errno.ENOSYS, "not handled")
            answer = handler(node, memoryview(request)[_HEADER.size :])
        except Exception as error:  # its process would hang without an answer
            code = getattr(error, "errno", None) or errno.EIO
        with suppress(OSError):  # its process or the mount may be gone
            os.write(self._device, _REPLY.pack(_REPLY.size + len(answer), -code, unique) + answer)

    # --- faults -----------------------------------------------------------------------------

    def _faults_of(self, fd: int) -> Faults:
        faults = self._faults
        return faults if os.readlink(f"/proc/self/fd/{fd}").endswith(faults.only) else Faults()

    def _fail(self, code: int) -> None:
        if code:
            with self._lock:
                self._num_hits += 1
            raise OSError(code, "as the test wants")

    def _hold(self, faults: Faults) -> None:
        with self._lock:
            self._num_hits += 1
        faults.lifted.wait()

    def _before_read(self, fd: int, offset: int) -> None:
        faults = self._faults_of(fd)
        with self._lock:
            is_held = faults.hold_reads > 0
            faults.hold_reads -= is_held
        if is_held:
            self._hold(faults)
        self._fail(faults.fail_reads if offset >= faults.fail_from else 0)

    def _before_write(self, fd: int, size: int) -> None:
        faults = self._faults_of(fd)
        self._fail(faults.fail_writes)
        is_full = False
        if faults.room_bytes is not None:
            with self._lock:
                is_full = size > faults.room_bytes
                faults.room_bytes -= 0 if is_full else size
        self._fail(errno.ENOSPC if is_full else 0)

    # --- requests ---------------------------------------------------------------------------

    def _init(self, node: int, body: memoryview) -> bytes:
        _, _, max_readahead, offered = struct.unpack_from("<4I", body)
        flags, pages = offered & (_BIG_WRITES | _MAX_PAGES), _MAX_WRITE // 4096
        unused = (0, 0, *[0] * 6)
        return _INIT.pack(7, 31, max_readahead, flags, 64, 48, _MAX_WRITE, 1, pages, 0, *unused)

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _entry(self, parent: int, name: str) -> bytes:
        return self._node_of(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent]))

    def _node_of(self, fd: int) -> bytes:
        """Describe the node of a file; this descriptor becomes the node's if it has none yet."""
        info = os.fstat(fd)
        with self._lock:
            if self._nodes.setdefault(info.st_ino, fd) != fd:
                os.close(fd)
        return struct.pack("<QQQQII", info.st_ino, 0, 0, 0, 0, 0) + _attributes(info)

    def _lookup(self, node: int, body: memoryview) -> bytes:
        return self._entry(node, _names(body)[0])

    def _getattr(self, node: int, body: memoryview) -> bytes:
        return bytes(16) + _attributes(os.fstat(self._nodes[node]))

    def _setattr(self, node: int, body: memoryview) -> bytes:
        what, _, handle, size, _, atime, mtime, _, *rest = _SETATTR.unpack_from(body)
        if what & _SET_MODE:
            os.chmod(self._path(node), stat.S_IMODE(rest[3]))
        if what & _SET_SIZE:
            os.truncate(handle if what & _HAS_HANDLE else self._path(node), size)
        if what & _SET_TIMES == _SET_TIMES:
            os.utime(self._path(node), (atime, mtime))
        return self._getattr(node, body)

    def _mknod(self, node: int, body: memoryview) -> bytes:
        (mode,), name = struct.unpack_from("<I", body), _names(body[16:])[0]
        os.mknod(name, mode, dir_fd=self._nodes[node])
        return self._entry(node, name)

    def _mkdir(self, node: int, body: memoryview) -> bytes:
        (mode,), name = struct.unpack_from("<I", body), _names(body[8:])[0]
        os.mkdir(name, mode, dir_fd=self._nodes[node])
        return self._entry(node, name)

    def _unlink(self, node: int, body: memoryview) -> bytes:
        os.unlink(_names(body)[0], dir_fd=self._nodes[node])
        return b""

    def _rmdir(self, node: int, body: memoryview) -> bytes:
        os.rmdir(_names(body)[0], dir_fd=self._nodes[node])
        return b""

    def _rename(self, node: int, body: memoryview, skip: int) -> bytes:
        (target,), (old, new) = struct.unpack_from("<Q", body), _names(body[skip:])
        os.rename(old, new, src_dir_fd=self._nodes[node], dst_dir_fd=self._nodes[target])
        return b""

    def _open(self, node: int, body: memoryview) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        return _opened(os.open(self._path(node), flags & ~(os.O_DIRECT | os.O_NOFOLLOW)))

    def _create(self, node: int, body: memoryview) -> bytes:
        (flags, mode), name = struct.unpack_from("<II", body), _names(body[16:])[0]
        fd = os.open(name, flags & ~os.O_DIRECT | os.O_CREAT, mode, dir_fd=self._nodes[node])
        return self._entry(node, name) + _opened(fd)

    def _tmpfile(self, node: int, body: memoryview) -> bytes:
        fd = os.open(self._path(node), os.O_TMPFILE | os.O_RDWR, 0o600)
        return self._node_of(os.open(f"/proc/self/fd/{fd}", os.O_PATH)) + _opened(fd)

    def _read(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        self._before_read(handle, offset)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        self._before_write(handle, size)
        return struct.pack("<II", os.pwrite(handle, body[_IO.size : _IO.size + size], offset), 0)

    def _fallocate(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, mode = struct.unpack_from("<QQQI", body)
        if not mode & _PUNCH_HOLE:
            self._before_write(handle, size)
        if _libc.fallocate(handle, mode, offset, size):
            raise OSError(ctypes.get_errno(), "fallocate")
        return b""

    def _fsync(self, node: int, body: memoryview) -> bytes:
        (handle,) = struct.unpack_from("<Q", body)
        if (faults := self._faults_of(handle)).hold_syncs:
            self._hold(faults)
        return b""  # tests do not need the bytes on the device

    def _release(self, node: int, body: memoryview) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _statfs(self, node: int, body: memoryview) -> bytes:
        disk = os.statvfs(self._path(_ROOT))
        counts = (disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree)
        return struct.pack("<5Q10I", *counts, disk.f_bsize, 255, disk.f_frsize, *[0] * 7)

    def _readdir(self, node: int, body: memoryview) -> bytes:
        """List the names after the first `offset` ones; changes meanwhile may be missed."""
        _, offset, size, *_ = _IO.unpack_from(body)
        answer = b""
        for number, name in enumerate(sorted(os.listdir(self._path(node)))[offset:], offset + 1):
            packed = _ENTRY.pack(number, number, len(name.encode())) + bytes(4) + name.encode()
            packed += bytes(-len(packed) % 8)
            if len(answer) + len(packed) > size:
                break
            answer += packed
        return answer


def _attributes(info: os.stat_result) -> bytes:
    times_ns = (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)
    seconds, rest = [each // 10**9 for each in times_ns], [each % 10**9 for each in times_ns]
    owner = (info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_rdev)
    sizes = (info.st_ino, info.st_size, info.st_blocks)
    return _ATTRIBUTES.pack(*sizes, *seconds, *rest, *owner, info.st_blksize, 0)


def _opened(fd: int) -> bytes:
    """Answer an open.

    Segments bypass the page cache, so that each read reaches this server. The index does not,
    because LMDB must be able to map it.
    """
    is_segment = os.readlink(f"/proc/self/fd/{fd}").endswith(".seg")
    return _OPENED.pack(fd, _DIRECT_IO if is_segment else 0, 0)


def _names(body: memoryview) -> list[str]:
    return [os.fsdecode(name) for name in bytes(body).split(b"\0")[:-1]]


class FaultyDisk:
    """The filesystem, mounted at `folder`. Its files are also visible in `backing`, without faults.

    Raises:
        PermissionError: Mounting is not allowed here.
    """

    def __init__(self, base: Path) -> None:
        self.folder, self.backing = base / "disk", base / "backing"
        self.folder.mkdir()
        self.backing.mkdir()
        try:
            device = os.open("/dev/fuse", os.O_RDWR)
        except OSError as error:
            raise PermissionError(f"/dev/fuse cannot be opened: {error.strerror}") from error
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
        target = os.fsencode(self.folder)
        if _libc.mount(b"tieredkv-test", target, b"fuse", 0, options.encode()):
            os.close(device)
            raise PermissionError(f"mount: {os.strerror(ctypes.get_errno())}")
        self._control, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(device), str(theirs.fileno()), str(self.backing)]
        self._server = subprocess.Popen(command, pass_fds=[device, theirs.fileno()])
        theirs.close()
        os.close(device)
        self._answers = self._control.makefile()

    def set_faults(self, **faults: str | int | bool) -> int:
        """Replace all faults by these; return how many requests the old ones have hit."""
        return self._say(faults)

    def num_hits(self) -> int:
        """Return how many requests have failed or hung since the faults were set."""
        return self._say(None)

    def _say(self, wanted: dict[str, str | int | bool] | None) -> int:
        self._control.sendall(json.dumps(wanted).encode() + b"\n")
        return int(self._answers.readline())

    def close(self) -> None:
        """Unmount the filesystem and end its server; requests that still hang are released."""
        self.set_faults()
        _libc.umount2(os.fsencode(self.folder), _MNT_DETACH)
        self._answers.close()
        self._control.close()
        self._server.wait(10)


@contextmanager
def mounted_faulty_disk(folder: Path) -> Iterator[FaultyDisk]:
    """Mount a disk that fails on demand; skip the test where mounting is not allowed."""
    try:
        disk = FaultyDisk(folder)
    except PermissionError as error:
        pytest.skip(f"a filesystem of ours cannot be mounted here ({error})")
    try:
        yield disk
    finally:
        disk.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0)
    Passthrough(int(sys.argv[1]), sys.argv[3]).serve(socket.socket(fileno=int(sys.argv[2])))
