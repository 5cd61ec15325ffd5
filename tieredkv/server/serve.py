"""Running a server: the socket, the engine's process, signals, and an orderly end.

It knows processes and signals; terminals are the command line's business.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import uvicorn

from tieredkv.config import Settings
from tieredkv.engine.loader import load_tokenizer
from tieredkv.engine.messages import EngineInfo
from tieredkv.errors import ConfigError
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.keys import Keys
from tieredkv.server.limits import MAX_HEADER_BYTES, TimedConnection
from tieredkv.types import Progress

logger = logging.getLogger(__name__)

STREAMS_END_S = 5
KEEP_ALIVE_S = 30
EXIT_INTERRUPTED = 130

OnReady = Callable[[str, EngineInfo], None]
"""Told the URL and what the engine is, once requests are answered."""


def bind(settings: Settings, *, allows_open_access: bool) -> socket.socket:
    """Take the address, before anything is loaded; nobody is answered yet.

    Raises:
        ConfigError: it cannot be had, or is open to others without a key.
    """
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"`host` = `{host}` is not an address of this machine: {error}") from None
    if not (is_local(address) or settings.api_keys or settings.api_keys_file or allows_open_access):
        raise ConfigError(
            f"`host` = `{host}` can be reached by others and no API key is set\n"
            "hint: give --api-key, or --allow-open-access if something else keeps others out"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        what = f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
        raise ConfigError(f"{what}\nhint: choose another --port") from None
    return sock


def is_local(address: tuple[object, ...]) -> bool:
    """Return whether only this machine can reach a socket's address."""
    return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback


class _HttpServer(uvicorn.Server):
    """uvicorn's server without its own signal handlers; says when it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the loop; uvicorn would end the process by raising them again."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._on_started()


@dataclass(kw_only=True)
class Server:
    """One run of the server.

    Attributes:
        settings: model, tiers, address and keys.
        on_progress: told how far loading and draining are.
        on_ready: told once, when requests are answered.
        is_strict: refuse unknown request fields.
        allows_open_access: listen on an outside address without a key.
        log_level: of the engine's process.
    """

    settings: Settings
    on_progress: Progress
    on_ready: OnReady
    is_strict: bool = False
    allows_open_access: bool = False
    log_level: str = "INFO"

    def serve(self) -> int:
        """Serve until SIGTERM or SIGINT and return the exit code.

        The first signal stops accepting, ends the streams and lets the engine write what it
        promised; a second one does not wait for that.

        Raises:
            TieredKVError: it cannot start; nothing stored was changed.
        """
        self.settings.check_server()
        self._stop = asyncio.Event()
        self._is_forced = False
        self._socket = bind(self.settings, allows_open_access=self.allows_open_access)
        with self._socket:
            local = is_local(self._socket.getsockname())
            self._keys = Keys(settings=self.settings, is_strict=self.is_strict, is_local=local)
            try:
                return asyncio.run(self._run())
            except asyncio.CancelledError:
                return EXIT_INTERRUPTED

    async def _run(self) -> int:
        """Start, serve, end."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            if self._stop.is_set():
                self._is_forced = True
                task.cancel()
            else:
                logger.info("stopping: streams end, then what was promised is written to disk")
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._keys.load)
        engine = EngineClient(on_progress=self.on_progress)
        has_served, engine_exit_code = False, 0
        try:
            if await self._has_started(engine):
                has_served = True
                await self._serve(engine)
        finally:
            if not self._is_forced:  # else the engine drains by itself, its server being gone
                engine_exit_code = await engine.shutdown(self.settings.drain_timeout)
        return 1 if has_served and engine_exit_code else 0

    async def _has_started(self, engine: EngineClient) -> bool:
        """Load model and tokenizer; False where a signal came first."""
        # The engine has no use for the keys.
        shares = {**self.settings.tenant_shares, **self._keys.shares}
        settings = replace(self.settings, api_keys=(), admin_key=None, tenant_shares=shares)
        starting = asyncio.create_task(engine.start(settings, log_level=self.log_level))
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, settings.model))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                engine.kill()
                return False
            starting.result()
            self._tokenization = Tokenization(
                await loading, has_canonical_tools=settings.canonical_tools == "on"
            )
        finally:
            for task in (starting, loading, stopping):
                task.cancel()
        return True

    async def _serve(self, engine: EngineClient) -> None:
        api = Api(self.settings, engine, self._tokenization, self._keys)
        config = uvicorn.Config(
            build_app(api),
            loop="asyncio",
            http=TimedConnection,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STREAMS_END_S,
        )
        host, port = self._socket.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        http = _HttpServer(config, lambda: self.on_ready(url, engine.info))
        serving = asyncio.create_task(http.serve([self._socket]))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            # Both at once: the engine's last word to each request is what ends its stream.
            engine.stop(self.settings.drain_timeout)
            http.should_exit = True
            await serving
        finally:
            stopping.cancel()
            self._tokenization.close()
