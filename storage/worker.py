"""The store worker: the one process that opens a store.

`python -m tieredkv.storage.worker FD` is started by `tieredkv.storage.worker_process` and ends when
its channel does, so that nobody has to look after it. It knows how a store is opened, and what to
do with an index that cannot be; serving it is `tieredkv.storage.service`'s.
"""

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Literal

import msgspec

from tieredkv.clock import Clock
from tieredkv.errors import ConfigError, StorageError, TieredKVError
from tieredkv.storage.channel import FrameChannel
from tieredkv.storage.folder import SET_ASIDE, StoreFolder
from tieredkv.storage.host import HostArena
from tieredkv.storage.index import is_damage
from tieredkv.storage.limits import described
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.service import StoreService
from tieredkv.storage.worker_messages import EngineMessage, Launch, Opening, refusal
from tieredkv.storage.worker_process import EXIT_DAMAGED, EXIT_FAILED, EXIT_REFUSED

logger = logging.getLogger(__name__)

_PARENT_POLL_S = 0.5
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Serve one store until the engine is done with it; the exit code is for the parent."""
    for number in _ENDINGS:  # the engine drains on these and needs its worker for it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # only a name, for `ps`
        Path("/proc/self/comm").write_text("tieredkv-store")
    logging.basicConfig(format="%(asctime)s store worker %(process)d %(levelname)s: %(message)s")
    raise_file_limit()
    sock = socket.socket(fileno=int(arguments[0]))
    channel = FrameChannel(sock, msgspec.msgpack.Decoder(EngineMessage))
    (launch,) = channel.receive(None)
    assert isinstance(launch, Launch), launch
    path, service = launch.options.path, None
    try:
        service = _open(launch, channel)
        service.run()
    except EOFError:  # nobody is left to answer to; what is stored survives a kill
        os._exit(EXIT_FAILED)
    except (StorageError, ConfigError, OSError, MemoryError) as error:
        if service is None and not is_damage(error):
            if not isinstance(error, TieredKVError):
                text = described(error) if isinstance(error, OSError) else str(error)
                error = StorageError(f"`{path}`: {text}")
            channel.send(refusal(error))
            return EXIT_REFUSED
        # The folder went away, its disk, or the index is damaged: try again.
        logger.error("the store of `%s` failed: %r", path, error)
        return EXIT_DAMAGED if is_damage(error) else EXIT_FAILED
    except Exception:  # a bug of ours, or bytes in the index that nobody thought of
        logger.exception("the store of `%s` broke", path)
        return EXIT_DAMAGED
    finally:
        channel.close()  # or a thread that its disk holds up would keep the engine waiting too
    return 0


def raise_file_limit() -> None:
    """Let this process open as many files as it may: a large store has hundreds of segments."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _leave_with(parent_pid: int, is_open: threading.Event) -> None:
    """End the process if its parent ends before the store is open; the service sees to it later."""
    while not is_open.wait(_PARENT_POLL_S):
        if os.getppid() != parent_pid:
            os._exit(EXIT_FAILED)


def _open(launch: Launch, channel: FrameChannel[EngineMessage]) -> StoreService:
    options, is_open = launch.options, threading.Event()
    threading.Thread(target=_leave_with, args=[launch.parent_pid, is_open], daemon=True).start()
    arena = HostArena.attach(*launch.arena) if launch.arena is not None else None
    notes = [set_aside(options.path, launch.set_aside)] if launch.set_aside else []
    store = BlockStore.open(
        options,
        Clock(options.clock_offset_file),
        progress=lambda done, total: channel.send(Opening(done, total)),
    )
    is_open.set()
    try:
        return StoreService(store, launch, channel, arena, notes)
    except BaseException:
        store.close()
        raise


def set_aside(path: str, what: Literal["index", "segments"]) -> str:
    """Rename the index for a later look, so that it is made again; erase the segments if need be.

    Returns what happened, for the operator.
    """
    folder = StoreFolder.claim(path, create=False)
    try:
        folder.set_aside()
        if what == "segments":
            shutil.rmtree(folder.segments_path)
    except OSError as error:
        raise StorageError(f"the damaged index of `{path}` cannot be set aside: {error}") from error
    finally:
        folder.release()
    left = "is made again from the slots" if what == "index" else "failed again: the store is empty"
    return f"the index of `{path}` was damaged and is set aside as `{SET_ASIDE}`; it {left}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
