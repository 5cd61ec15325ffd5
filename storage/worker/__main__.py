"""The store worker: the one process that opens a store.

`tieredkv.storage.worker.process` starts it as `python -m tieredkv.storage.worker FD`. It ends when
its channel ends, so nobody has to look after it. It knows how a store is opened and how a failure
is told to the engine; `tieredkv.storage.worker.service` serves the store.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from tieredkv.clock import Clock
from tieredkv.errors import ConfigError, CorruptIndexError, StorageError, StoreFailedError
from tieredkv.storage.folder.folder import SET_ASIDE, StoreFolder
from tieredkv.storage.index.pages import check_pages
from tieredkv.storage.messages.engine import EngineMessage, IndexSetAside, Launch
from tieredkv.storage.messages.operator import StillBusy
from tieredkv.storage.opening import open_parts
from tieredkv.storage.store import Store
from tieredkv.storage.worker.look import Look, look
from tieredkv.storage.worker.process import (
    EXIT_DAMAGED,
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_UNEXPLAINED,
)
from tieredkv.storage.worker.service import StoreService
from tieredkv.wire.arena import HostArena
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.limits import described, forbid_core_files, raise_file_limit
from tieredkv.wire.process import Refused

logger = logging.getLogger(__name__)

_PARENT_POLL_S = 0.5
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Serve one store until the engine is done with it; the exit code is for the parent."""
    for number in _IGNORED_SIGNALS:  # the engine stops on these and still writes blocks then
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # only a name, for `ps`
        Path("/proc/self/comm").write_text("tieredkv-store")
    logging.basicConfig(format="%(asctime)s store worker %(process)d %(levelname)s: %(message)s")
    raise_file_limit()
    forbid_core_files()
    sock = socket.socket(fileno=int(arguments[0]))
    channel = FrameChannel(sock, msgspec.msgpack.Decoder(EngineMessage))
    try:
        launch, *more = channel.receive(None)
    except EOFError:  # the parent ended before it said which store to serve
        return EXIT_FAILED
    assert isinstance(launch, Launch), launch
    if more:  # a `CloseCall`, as of a command that was interrupted at once
        return 0
    # The parent reads the stack of the thread that crashed: was it using the index?
    faulthandler.enable(launch.stack_fd, all_threads=False)
    service: StoreService | Look | None = None
    try:
        service = _start(launch, channel)
        service.run()
    except EOFError:  # the engine is gone; what is stored survives a sudden end
        os._exit(EXIT_FAILED)
    except Exception as error:
        code = EXIT_REFUSED if service is None else EXIT_FAILED
        return _tell(channel, launch.options.path, error, code)
    finally:
        channel.close()  # a thread that waits for the disk may delay the exit; the engine moves on
    return 0


def _tell(
    channel: FrameChannel[EngineMessage], path: str, error: Exception, code_if_known: int
) -> int:
    """Tell the engine why the store cannot be served, and return the exit code that fits.

    Whatever is no known kind of damage, and no error that says what it comes from, is unexplained:
    a bug of ours, perhaps, and no reason to change a file.
    """
    match error:
        case CorruptIndexError():
            code = EXIT_DAMAGED
        case StoreFailedError():
            code = EXIT_UNEXPLAINED
        case StorageError() | ConfigError():
            code = code_if_known
        case OSError():
            code, error = code_if_known, StorageError(f"`{path}`: {described(error)}")
        case MemoryError():
            what = f"the store worker of `{path}` ran out of memory"
            code, error = code_if_known, StorageError(what)
        case _:
            code = EXIT_UNEXPLAINED
            logger.error("the store worker of `%s` failed", path, exc_info=error)
            error = StoreFailedError(f"the store worker of `{path}` failed: {error!r}")
    channel.send(Refused.of(error))
    return code


def _leave_with(parent_pid: int, is_open: threading.Event) -> None:
    """End the process if its parent ends before the store is open; later the service does that."""
    while not is_open.wait(_PARENT_POLL_S):
        if os.getppid() != parent_pid:
            os._exit(EXIT_FAILED)


def _start(launch: Launch, channel: FrameChannel[EngineMessage]) -> StoreService | Look:
    """Open the store, or look at it."""
    is_open = threading.Event()
    threading.Thread(target=_leave_with, args=[launch.parent_pid, is_open], daemon=True).start()
    if launch.look_fd is not None:
        return look(launch, channel)
    options = launch.options
    arena = HostArena.attach(*launch.arena) if launch.arena is not None else None

    def prepare(folder: StoreFolder) -> None:
        match launch.index:
            case "examined":
                check_pages(folder.index_path)
            case "set_aside":
                channel.send(IndexSetAside(set_aside_index(folder)))

    parts = open_parts(
        options,
        Clock(options.clock_offset_file),
        prepare=prepare,
        progress=lambda *_: channel.send(StillBusy()),
    )
    store = Store(parts, options)
    is_open.set()
    gc.collect()
    gc.freeze()  # what is here stays, and looking at it again and again would stop all threads
    try:
        return StoreService(store, launch, channel, arena)
    except BaseException:
        store.close()
        raise


def set_aside_index(folder: StoreFolder) -> str:
    """Rename the index for a later look, so that it is made again from the extents.

    Returns what happened, for the operator.
    """
    try:
        folder.set_aside()
    except OSError as error:
        what = f"the damaged index of `{folder.path}` cannot be set aside: {error}"
        raise StorageError(what) from error
    what = f"the index of `{folder.path}` is damaged and was set aside as `{SET_ASIDE}`"
    return f"{what}; it is rebuilt from the extents"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
