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
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.garbage import look_seldom
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.connections import MAX_HEADER_BYTES, Connections, max_connections
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.keys import Keys
from tieredkv.server.recorder import Recorder
from tieredkv.server.threads import bound_arenas
from tieredkv.server.tokenizations import family_of, make_tokenization, template_arguments
from tieredkv.types import Progress

logger = logging.getLogger(__name__)

STREAMS_END_S = 5
EXIT_INTERRUPTED = 130
SWITCH_INTERVAL_S = 0.001
"""A thread that reads a long request gives way to the event loop after this time."""

OnReady = Callable[[str, EngineInfo], None]
"""Called with the URL and the engine's description, once requests are answered."""


def bind(settings: Settings, *, allows_open_access: bool) -> socket.socket:
    """Bind the address before anything is loaded; the socket does not listen yet.

    Raises:
        ConfigError: the address cannot be bound, or others can reach it and no key is set.
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
            f"`host` = `{host}` can be reached by others, and no API key is set\n"
            "hint: give --api-key, or --allow-open-access if something else keeps others out"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        what = f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
        raise ConfigError(f"{what}\nhint: choose another --port") from None
    return sock


def is_local(address: tuple[object, ...]) -> bool:
    """Return whether only this machine can reach a socket's address."""
    return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback


def http_config(app: ASGIApp, settings: Settings, max_open: int) -> uvicorn.Config:
    """Return how uvicorn serves an application, with at most so many connections."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=cast(Any, Connections(max_open)),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=cast(int, settings.idle_timeout),  # uvicorn takes fractions, too
        timeout_graceful_shutdown=STREAMS_END_S,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn's server without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the loop; uvicorn would end the process by raising them again."""
        yield


@dataclass(kw_only=True)
class Server:
    """One run of the server.

    Attributes:
        settings: model, tiers, address and keys.
        on_progress: called with the progress of loading and draining.
        on_ready: called once, when requests are answered.
        is_strict: whether unknown request fields are refused.
        allows_open_access: whether a non-loopback address may be used without a key.
        log_level: of the engine's process.
        record: new file for a trace of the requests; None for none.
    """

    settings: Settings
    on_progress: Progress
    on_ready: OnReady
    is_strict: bool = False
    allows_open_access: bool = False
    log_level: str = "INFO"
    record: Path | None = None

    def serve(self) -> int:
        """Serve until SIGTERM, SIGINT or the engine's death, and return the exit code.

        The first signal stops accepting, ends the streams and lets the engine write what it
        promised; a second signal does not wait for that. After the engine's death the clients are
        told, and the exit code is 1, so that a supervisor starts the server again.

        Raises:
            TieredKVError: it cannot start; nothing stored was changed.
        """
        self.settings.check_server()
        family_of(self.settings, "")  # a name that is not known is refused at once
        template_arguments(self.settings)
        bound_arenas()
        with (
            bind(self.settings, allows_open_access=self.allows_open_access) as sock,
            self._recording() as recorder,
        ):
            local = is_local(sock.getsockname())
            keys = Keys(settings=self.settings, is_strict=self.is_strict, is_local=local)
            try:
                return asyncio.run(self._run(sock, keys, recorder))
            except asyncio.CancelledError:
                return EXIT_INTERRUPTED

    def _recording(self) -> contextlib.AbstractContextManager[Recorder | None]:
        """Return what records the requests while the context lasts.

        Raises:
            ConfigError: the file exists, or cannot be made.
        """
        if self.record is None:
            return contextlib.nullcontext()
        return contextlib.closing(Recorder(self.record, self.settings))

    async def _run(self, sock: socket.socket, keys: Keys, recorder: Recorder | None) -> int:
        """Start, serve, end."""
        # The engine has no use for the keys.
        settings = replace(self.settings, api_keys=(), admin_key=None, tenant_shares=keys.shares)
        exit_code, signals, task = 0, [], asyncio.current_task()

        def on_signal(number: int) -> None:
            signals.append(number)
            if len(signals) == 1:
                logger.info("stopping: open requests are ended, then promised blocks are written")
                self._end()
            elif task is not None:
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        # After the handlers: from its first moment on, a signal ends the engine too.
        engine = EngineClient(settings, on_progress=self.on_progress, log_level=self.log_level)

        async def reload() -> None:
            async with reloading:
                try:
                    keys.adopt(await asyncio.to_thread(keys.read))
                    engine.give_shares(keys.shares)
                except ConfigError as error:
                    logger.error("the new keys are refused and the old ones stay valid: %s", error)

        reloading, reloads = asyncio.Lock(), set[asyncio.Task[None]]()

        def on_hangup() -> None:
            reloads.add(task := loop.create_task(reload()))
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        self._end = engine.kill
        try:
            tokenization = await self._load(engine)
            if not signals:
                # Looking for garbage stops every thread. What was loaded stays for good and is
                # not looked through; what a large body becomes is seldom looked through.
                look_seldom()
                sys.setswitchinterval(SWITCH_INTERVAL_S)
                made = Api(self.settings, engine, tokenization, keys, recorder)
                with contextlib.closing(made) as api:
                    await self._serve(sock, api, engine)
        except TieredKVError:
            if not signals:  # else the engine was killed while it started
                raise
        finally:
            if len(signals) < 2:  # else the engine drains by itself, its server being gone
                exit_code = await engine.shutdown(self.settings.drain_timeout)
                logger.info("stopped")
        return 1 if engine.has_died or (exit_code and self._end != engine.kill) else 0

    async def _load(self, engine: EngineClient) -> Tokenization:
        """Load the tokenizer while the engine loads the model."""
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, self.settings.model))
        try:
            await engine.ready()
            tokenizer = await loading
            tokenization = make_tokenization(tokenizer, self.settings, engine.info.max_model_len)
            family = tokenization.family
            if family is not None:
                what = "tool calls and reasoning are parsed as the `%s` family writes them"
                logger.info(what, family.name)
            elif (self.settings.tool_parser, self.settings.reasoning_parser) == ("none", "none"):
                logger.info("tool calls and reasoning are not parsed: both parsers are `none`")
            else:
                what = "tool calls and reasoning are not parsed: unknown chat template"
                logger.info("%s; hint: set --tool-parser", what)
            await asyncio.to_thread(tokenization.try_template)
            return tokenization
        finally:
            loading.cancel()

    async def _serve(self, sock: socket.socket, api: Api, engine: EngineClient) -> None:
        """Answer requests until a signal comes."""
        config = http_config(build_app(api), self.settings, max_connections(api.max_requests))
        host, port = sock.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        http = _HttpServer(config)

        def end() -> None:
            # Both at once: the engine's last word to each request is what ends its stream.
            engine.stop()
            http.should_exit = True

        def end_with_engine() -> None:
            http.should_exit = True

        self._end, engine.on_death = end, end_with_engine
        http.should_exit = engine.has_died  # already, while the tokenizer was loaded
        sock.listen(config.backlog)  # from here on nobody is turned away
        self.on_ready(url, engine.info)
        keeping = asyncio.create_task(api.history.keep())
        try:
            await http.serve([sock])
        finally:
            keeping.cancel()
