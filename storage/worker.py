"""The store worker: the one process that opens a store.

`python -m tieredkv.storage.worker ARGUMENT` is started by `tieredkv.storage.process` and ends when
its channel does, so that nobody has to look after it. It knows how a store is opened, and what to
do with an index that cannot be; serving it is `tieredkv.storage.service`'s.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import msgspec

from tieredkv.clock import Clock
from tieredkv.errors import StorageError, TieredKVError
from tieredkv.storage import messages
from tieredkv.storage.channel import FrameChannel
from tieredkv.storage.compression import Packing
from tieredkv.storage.directory import INDEX, SEGMENTS, StoreDirectory
from tieredkv.storage.host import HostArena
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.messages import EngineMessage, LaunchArgument
from tieredkv.storage.process import EXIT_DAMAGED, EXIT_FAILED, EXIT_REFUSED
from tieredkv.storage.service import StoreService, is_damage

logger = logging.getLogger(__name__)

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Serve one store until the engine is done with it; the exit code is for the parent."""
    argument = msgspec.json.decode(arguments[0], type=LaunchArgument)
    for number in _ENDINGS:  # the engine drains on these and needs its worker for it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # only a name, for `ps`
        Path("/proc/self/comm").write_text("tieredkv-store")
    logging.basicConfig(format="%(asctime)s store worker %(process)d %(levelname)s: %(message)s")
    sock = socket.socket(fileno=argument.channel_fd)
    channel = FrameChannel(sock, msgspec.msgpack.Decoder(EngineMessage))
    try:
        service = _open(argument, channel)
    except TieredKVError as error:
        if is_damage(error):
            logger.error("%s", error)
            return EXIT_DAMAGED
        channel.send(messages.refusal(error))
        return EXIT_REFUSED
    except Exception:  # a bug of ours, or bytes in the index that nobody thought of
        logger.exception("the store of `%s` cannot be opened", argument.options.path)
        return EXIT_DAMAGED
    try:
        service.run()
    except OSError as error:  # the folder went away, or its disk: the next start tries again
        logger.error("the store of `%s` failed: %s", argument.options.path, error)
        return EXIT_DAMAGED if is_damage(error) else EXIT_FAILED
    finally:
        channel.close()  # or a thread that its disk holds up would keep the engine waiting too
    return 0


def _open(argument: LaunchArgument, channel: FrameChannel[EngineMessage]) -> StoreService:
    options = argument.options
    arena = HostArena.attach(*argument.arena) if argument.arena is not None else None
    clock = Clock(options.clock_offset_file)
    notes = [set_aside_index(options.path)] if argument.set_aside_index else []
    store = BlockStore.open(
        options.path,
        budget_bytes=options.budget_bytes,
        clock=clock,
        sync=options.sync,
        create=options.create,
    )
    store.packing = Packing(options.compression, options.element_bytes)
    try:
        return StoreService(store, argument, channel, arena, notes)
    except BaseException:
        store.close()
        raise


def set_aside_index(path: str) -> str:
    """Rename the index for a later look and erase the payloads, which nothing would ever expire.

    Of several indexes set aside the last one stays. Returns what happened, for the operator.
    """
    directory = StoreDirectory.claim(path, create=False)
    try:
        earlier = sorted(Path(path).glob(f"{INDEX}.bad-*"), key=_number_of)
        target = Path(path) / f"{INDEX}.bad-{_number_of(earlier[-1]) + 1 if earlier else 1}"
        os.rename(Path(path) / INDEX, target)
        for old in earlier:
            shutil.rmtree(old)
        shutil.rmtree(Path(path) / SEGMENTS)
    except OSError as error:
        raise StorageError(f"the damaged index of `{path}` cannot be set aside: {error}") from error
    finally:
        directory.release()
    return (
        f"the index of `{path}` killed its worker twice; it is now `{target}`, the store is empty"
    )


def _number_of(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
