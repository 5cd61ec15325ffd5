"""Verbs by a server's URL have the output and the exit codes that they have by its folder."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import httpx
import msgspec
import pytest

from tests.golden import told
from tests.serving import Done, tieredkv
from tests.tieredkv.test_app import Engine, answered
from tieredkv.cli import controls, http_answers, server_control
from tieredkv.cli.http_answers import warn_if_key_is_readable
from tieredkv.cli.server_control import read_list
from tieredkv.config import Settings
from tieredkv.errors import (
    ConfigError,
    StorageError,
    StoreUnreachableError,
    TieredKVError,
    UnknownIdError,
)
from tieredkv.operate.ask import document
from tieredkv.operate.calls import Call, Df, EvictFilter, Inspect, Ls
from tieredkv.operate.columns import PAGE_CHAINS
from tieredkv.operate.infos import BlockInfo, ChainInfo
from tieredkv.operate.jobs import Job
from tieredkv.operate.verb import Asking
from tieredkv.server import admin
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys
from tieredkv.types import Tier

KEY = "operator"
URL = "http://127.0.0.1:8000"
DISK = {"blocks": 2, "bytes_live": 128, "encryption": "off", "is_compressing": False}
DF = {
    "device": {"blocks": 1, "bytes_live": 64},
    "host": {"blocks": 0, "bytes_live": 0},
    "disk": {**DISK, "lifetimes": {"shortfall": "it is small"}},
    "tenants": {},
    "writer_pid": 7,
}
NAMESPACES = [
    {"namespace": "ab" * 32, "root": "cd" * 32, "model": "m", "blocks": 2, "bytes": 128}
    | {"last_used": 5.0}
]
REPORT = {
    "prompt_tokens": 9,
    "by_tier": {"device": 4, "host": 0, "disk": 2},
    "diverges_at": 6,
    "reason": "expired",
    "predicted_ttft_ms": {"compute": 10.5, "planned": None},
}
EVICTED = {"evicted_blocks": 3, "freed_bytes": 192, "unknown_ids": [], "disk": None}
ID = "1f" * 8


def chain_info(number: int) -> ChainInfo:
    return ChainInfo(
        id=f"{number:032x}-{number:032x}",
        namespace="ab" * 32,
        root="cd" * 32,
        blocks=2,
        last_position=1,
        bytes=128,
        stored_bytes=64,
        tokens=32,
        blocks_by_tier={Tier.DEVICE: 1, Tier.DISK: 2},
        retention="24h",
        computed_at_min=1.25,
        computed_at_max=2.5,
        expires_at_min=3.0,
        last_used=2.0,
        last_used_max=2.0,
        hits=number,
    )


def block_info(position: int) -> BlockInfo:
    return BlockInfo(
        block_hash=f"{position + 1:064x}",
        parent_hash=f"{position:064x}",
        root="cd" * 32,
        namespace="ab" * 32,
        position=position,
        tiers=[Tier.HOST],
        size_bytes=64,
        retention="24h",
        computed_at=1.0,
        last_used=1.0,
        expires_at=9.0,
        hits=0,
    )


class Store:
    """Stands in for a store's worker, both behind a server and without one.

    Attributes:
        error: What every call ends with; None for an answer.
        evicted: Its answer to an eviction.
        rest: What follows a list of chains.
        calls: What it was asked.
    """

    error: TieredKVError | None = None
    evicted: Mapping[str, Any] = MappingProxyType(EVICTED)
    rest: Mapping[str, Any] = MappingProxyType({})
    calls: ClassVar[list[Call]] = []

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def answer(self, call: Call) -> dict[str, Any]:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        match call:
            case Df(verbose=verbose):
                return DF | ({"namespaces": NAMESPACES, "num_namespaces": 1} if verbose else {})
            case Inspect():
                return REPORT
            case EvictFilter():
                return dict(self.evicted)
        raise AssertionError(call)

    def pages(self, call: Call) -> Asking:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        if isinstance(call, Inspect):
            yield [block_info(0), block_info(1)]
            yield [block_info(2)]
        elif isinstance(call, Ls) and call.filter != "blocks>9":
            yield [chain_info(1), chain_info(2)]
            yield [chain_info(3)]
        return dict(self.rest)


class InProcess:
    """Stands in for the process of a verb."""

    def __init__(self, store: type[Store]) -> None:
        self._store = store

    async def start(self, job: Job) -> "InProcess":
        """Carry the verb out at once."""
        store, call = self._store(), job.call
        parts = [*document(call, store.pages(call))] if call.listed_as else []
        self._whole = "".join(parts).encode() or msgspec.json.encode(store.answer(call))
        return self

    async def answer(self) -> dict[str, Any]:
        return dict(msgspec.json.decode(self._whole))

    async def text(self) -> AsyncIterator[bytes]:
        yield self._whole


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    """Have both roads lead to the same stand-in."""

    class Fresh(Store):
        calls: ClassVar[list[Call]] = []

    monkeypatch.setattr(server_control, "PAGE_ITEMS", 2)
    monkeypatch.setattr(controls, "StoreControl", Fresh)
    monkeypatch.setattr(admin, "StoreControl", Fresh)
    monkeypatch.setattr(admin, "VerbProcess", InProcess(Fresh))
    return Fresh


Ask = Callable[..., Done]


@pytest.fixture
def by_url(
    store: type[Store], tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Ask:
    """Return what runs a verb by the URL of a server over the stand-in."""

    def make(*words: str, key: str | None = KEY, settings: Settings | None = None) -> Done:
        settings = settings or Settings(admin_key=KEY, disk_dir=str(tmp_path))
        keys = Keys(settings=settings, is_strict=False, is_local=True)
        app = build_app(Api(settings, cast(Any, Engine(0.0, answered)), tokenization, keys))

        async def send(request: httpx.Request) -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
                asked = http.build_request(
                    request.method, request.url, content=request.content, headers=request.headers
                )
                answer = await http.send(asked)
                return httpx.Response(answer.status_code, content=answer.content)

        def client(url: str, **options: Any) -> httpx.Client:
            transport = httpx.MockTransport(lambda request: asyncio.run(send(request)))
            return httpx.Client(base_url=url, transport=transport, **options)

        monkeypatch.setattr(http_answers, "http_client", client)
        environ = {"TIEREDKV_ADMIN_KEY": key} if key else {}
        return tieredkv(words[0], "--url", URL, *words[1:], **environ)

    return make


@pytest.fixture
def by_folder(store: type[Store], tmp_path: Path) -> Ask:
    """Return what runs a verb by the folder of the stand-in."""
    return lambda *words: tieredkv(words[0], "--disk-dir", str(tmp_path), *words[1:])


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ages be told alike."""
    monkeypatch.setattr("time.time", lambda: 1000.0)


VERBS = [
    ("df",),
    ("df", "-v"),
    ("ls",),
    ("ls", "--filter", "blocks>9"),
    ("ls", "--sort", "-size", "--limit", "2"),
    ("inspect", ID),
    ("inspect", ID, "--following"),
    ("evict", ID, "-y"),
    ("evict", "--filter", "idle>1h", "--dry-run"),
    ("evict", "--all", "--tier", "host", "-y"),
    ("evict", "--older-than", "2h", "--ns", "ab", "-y"),
    ("evict", "--all", "--to", "disk", "-y"),
]


@pytest.mark.parametrize("form", ["", "--json", "-q"])
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_each_verb_and_form_is_the_same_by_both_roads(
    store: type[Store], by_url: Ask, by_folder: Ask, words: tuple[str, ...], form: str
) -> None:
    words = (*words, form) if form else words
    one = by_url(*words)
    first = list(store.calls)
    other = by_folder(*words)
    assert one.stdout == other.stdout
    assert one == other and one.returncode == 0, one.stderr
    assert first == store.calls[len(first) :], "the same is asked of the store"


def test_a_prompt_is_told_of_alike(by_url: Ask, by_folder: Ask, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("some words")
    for form in ([], ["--json"]):
        words = ("inspect", "--prompt-file", str(tmp_path / "prompt.txt"), *form)
        assert by_url(*words) == by_folder(*words)
    assert json.loads(by_url(*words).stdout) == REPORT


@pytest.mark.parametrize(
    "evicted",
    [
        {**EVICTED, "unknown_ids": [ID]},
        {**EVICTED, "evicted_blocks": 0},
        {**EVICTED, "refused_blocks": 2},
        {**EVICTED, "disk": {"erased_keys": ["k"], "kept_keys": []}},
        {**EVICTED, "disk": {"erased_keys": [], "kept_keys": ["k"], "keys_error": "read-only"}},
    ],
)
def test_what_an_eviction_could_not_do_is_told_alike(
    store: type[Store],
    by_url: Ask,
    by_folder: Ask,
    monkeypatch: pytest.MonkeyPatch,
    evicted: dict[str, Any],
) -> None:
    monkeypatch.setattr(store, "evicted", evicted)
    is_kept = "keys_error" in (evicted["disk"] or {})
    for form in ([], ["--json"], ["-q"]):
        one = by_url("evict", ID, "-y", *form)
        assert ("error: read-only\n" in one.stderr) is is_kept
        assert one == by_folder("evict", ID, "-y", *form)
        assert one.returncode == int(evicted["disk"] is None or is_kept)


def test_a_list_without_what_the_engine_has_is_warned_of_alike(
    store: type[Store], by_url: Ask, by_folder: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "rest", {"engine": "no answer"})
    for form in ([], ["--json"]):
        one = by_url("ls", *form)
        assert one == by_folder("ls", *form)
        assert one.stderr.startswith("warning: ")


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UnknownIdError(f"no chain has the id `{ID}`\nhint: look"), 1),
        (StorageError("the disk is broken"), 1),
        (StoreUnreachableError("the engine is silent\nhint: again"), 3),
        (ConfigError("this cannot be"), 2),
    ],
)
@pytest.mark.parametrize("words", [("ls",), ("inspect", ID), ("evict", "--all", "-y")])
def test_errors_are_told_alike(
    store: type[Store],
    by_url: Ask,
    by_folder: Ask,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    error: TieredKVError,
    exit_code: int,
) -> None:
    monkeypatch.setattr(store, "error", error)
    assert by_url(*words) == by_folder(*words)
    assert by_url(*words).returncode == exit_code


def test_a_server_without_a_disk_tier_tells_no_writer(
    by_url: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def operate(_engine: Engine, _call: Call) -> list[dict[str, Any]]:
        return [{**DF, "disk": None, "writer_pid": None}]

    monkeypatch.setattr(Engine, "operate", operate)
    done = by_url("df", settings=Settings(admin_key=KEY))
    assert (done.returncode, done.stderr) == (0, "")
    assert ["device", "1"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert "writer" not in done.stdout and "version" not in done.stdout


def test_a_server_without_an_admin_key_names_the_option_that_sets_one(by_url: Ask) -> None:
    done = by_url("df", key=None, settings=Settings(api_keys=("sk-a",)))
    assert (done.returncode, done.stdout) == (2, "")
    told(done.stderr)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_key_that_is_missing_or_wrong_is_refused_and_the_way_out_is_named(
    by_url: Ask, key: str | None
) -> None:
    done = by_url("evict", "--all", "-y", key=key)
    assert (done.returncode, done.stdout) == (2, "")
    told(done.stderr)


@pytest.mark.parametrize(
    "words", [("df",), ("ls",), ("inspect", ID), ("evict", "--all", "-y")], ids=" ".join
)
def test_no_server_is_exit_code_3(words: tuple[str, ...]) -> None:
    for url in ("http://127.0.0.1:1", "nonsense", "http://[::"):
        done = tieredkv(words[0], "--url", url, *words[1:])
        assert (done.returncode, done.stdout) == (3, ""), done.stderr
        assert url in done.stderr


@pytest.mark.parametrize("num_told", [300, 0])
def test_a_list_that_is_cut_short_is_exit_code_3_and_no_whole_answer(
    num_told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b'{"chains": ['
            for number in range(num_told):
                yield msgspec.json.encode(chain_info(number)) + b", "
            raise httpx.ReadError("connection reset")

    def client(url: str, **options: Any) -> httpx.Client:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Cut()))
        return httpx.Client(base_url=url, transport=transport, **options)

    monkeypatch.setattr(http_answers, "http_client", client)
    done = tieredkv("ls", "--url", URL, "-q")
    assert (done.returncode, len(done.stdout.splitlines())) == (3, num_told // 256 * 256)
    told(done.stderr)


@pytest.mark.parametrize("verb", ["df", "ls", "inspect", "evict", "top"])
def test_a_folder_and_a_url_together_are_refused(verb: str, tmp_path: Path) -> None:
    more = {"inspect": [ID], "evict": ["--all", "-y"]}.get(verb, [])
    done = tieredkv(verb, "--disk-dir", str(tmp_path), "--url", URL, *more)
    assert (done.returncode, done.stdout) == (2, "")
    told(done.stderr, hide={f"tieredkv {verb}": "tieredkv VERB"})


@pytest.mark.parametrize("verb", ["df", "ls", "inspect", "evict"])
def test_neither_a_folder_nor_a_url_is_refused_and_both_are_named(verb: str) -> None:
    more = {"inspect": [ID], "evict": ["--all", "-y"]}.get(verb, [])
    done = tieredkv(verb, *more)
    assert (done.returncode, done.stdout) == (2, "")
    told(done.stderr, hide={f"tieredkv {verb}": "tieredkv VERB"})


def test_a_folder_of_the_environment_gives_way_to_a_url(
    by_url: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDKV_DISK_DIR", "/no/where")
    assert by_url("df").returncode == 0


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        ("http://gpu1.invalid:8000", True),
        ("http://10.0.0.9", True),
        ("https://gpu1.invalid", False),
        ("http://localhost:1", False),
        ("http://[::1]:1", False),
        ("http://127.0.0.1:1", False),
    ],
)
def test_a_key_over_plain_http_to_another_machine_is_warned_of(
    url: str, is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("k", None):
        warn_if_key_is_readable(url, key)
        assert capsys.readouterr().err.startswith("warning: ") is bool(is_warned and key)


@pytest.mark.parametrize(
    "words",
    [("df",), ("top", "--once"), ("warm", "-"), ("bench", "serve", "--duration", "1")],
    ids=" ".join,
)
def test_each_verb_that_sends_a_key_warns_of_plain_http(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, **_: object) -> None:
        raise httpx.InvalidURL(url)

    monkeypatch.setattr(http_answers, "http_client", fail)
    for module in ("cli.warm", "bench.conversations"):
        monkeypatch.setattr(f"tieredkv.{module}.async_http_client", fail)
    option = "--api-key" if words[0] in ("warm", "bench") else "--admin-key"
    done = tieredkv(*words, "--url", "http://gpu1.invalid", option, KEY, stdin='"some text"\n')
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("warning: "), done.stderr
    assert KEY not in done.stderr


DOCUMENT = '{"chains": [{"a": "]}, \u00e4", "b": [1]}, {"a": "\\"", "b": []}], "engine": "no"}'


def read(texts: Iterator[str]) -> tuple[list[Any], dict[str, Any]]:
    items, reading = list[Any](), read_list(texts, "chains")
    while True:
        try:
            items.append(next(reading))
        except StopIteration as ending:
            return items, ending.value


@pytest.mark.parametrize("size", range(1, len(DOCUMENT) + 1))
def test_a_list_is_read_wherever_it_is_cut(size: int) -> None:
    texts = (DOCUMENT[at : at + size] for at in range(0, len(DOCUMENT), size))
    whole = json.loads(DOCUMENT)
    assert read(texts) == (whole["chains"], {"engine": "no"})


def test_tables_are_cut_where_those_of_a_store_are() -> None:
    assert server_control.PAGE_ITEMS == PAGE_CHAINS


def test_an_empty_list_is_read() -> None:
    assert read(iter(['{"chains": [', "]}"])) == ([], {})


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "[]", '{"chain": []}', DOCUMENT[:30], DOCUMENT[:-3], '{"chains": [{}, x]}'],
)
def test_what_is_no_list_or_is_cut_short_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(iter([text]))
