"""The command line on encrypted stores: keys that evict prints, proofs of erasure, rotation."""

import asyncio
import errno
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.golden import refused, told
from tests.operate.test_ask import engine_that_says
from tests.storage.blocks import change_bytes, digest, evict, make_record, open_store, put, sweep
from tests.storage.conftest import Harness, Mailbox, make_chain
from tieredkv.cli.main import cli, main
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.errors import ConfigError, MissingKeyError, RequestError, StorageError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Ls, Rotate, Verify, decoded
from tieredkv.operate.verify import Findings
from tieredkv.server import admin
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.store import Store
from tieredkv.types import BlockRecord

MINE, THEIRS = digest("tenant"), digest("other")


class Stopped:
    """A stopped store with three chains of one tenant and one of another."""

    def __init__(self, base: Path) -> None:
        self.folder, self.key_dir = base / "kv", base / "keys"
        now = Clock().now()
        mine = [make_record(f"mine {i}", now=now) for i in range(3)]
        theirs = [make_record("theirs", i, now=now, namespace=THEIRS) for i in range(2)]
        self.records: list[BlockRecord] = [*mine, *theirs]
        with open_store(self.folder, Clock(), **self.options()) as store:
            put(store, *self.records)
            assert store.keys is not None
            self.keys = {key.scope[:32]: key.id.hex() for key in store.keys.table}

    def options(self) -> dict[str, Any]:
        return {"encryption": "on", "key_dir": str(self.key_dir)}

    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, "--disk-dir", str(self.folder)])

    def ask(self, *arguments: str) -> Any:
        return json.loads(self.invoke(*arguments, "--json").stdout.splitlines()[-1])


def old_bytes(old: bytes, _: bytes) -> bytes:
    return old


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stopped:
    monkeypatch.setenv("TIEREDKV_DISK_KEY_DIR", str(tmp_path / "keys"))
    return Stopped(tmp_path)


def test_evict_prints_the_keys_that_it_erased_and_kept(stopped: Stopped) -> None:
    chains = stopped.ask("ls")["chains"]
    one = next(each["id"] for each in chains if each["namespace"] == MINE.hex())
    text = stopped.invoke("evict", one, "-y").stdout
    assert f"kept key {stopped.keys[MINE]}, which other blocks need" in text
    told = stopped.ask("evict", "--ns", THEIRS.hex()[:12], "-y")["disk"]
    assert (told["erased_keys"], told["kept_keys"]) == ([stopped.keys[THEIRS]], [])
    dry = stopped.ask("evict", "--all", "--dry-run")["disk"]
    assert (dry["erased_keys"], dry["kept_keys"]) == ([], [])
    assert f"erased key {stopped.keys[MINE]}" in stopped.invoke("evict", "--all", "-y").stdout


def test_a_proof_finds_what_is_left_and_then_nothing(stopped: Stopped) -> None:
    key, left = stopped.keys[THEIRS], {"keys": 1, "blocks": 2, "extents": 2}
    for what in ([key], ["--ns", THEIRS.hex()[:16]]):
        found = stopped.invoke("verify", "--prove-erased", *what, "--json")
        answer = json.loads(found.stdout)
        assert answer.pop("checked") >= 5
        assert (found.exit_code or 0, answer) == (0, {"erased": False, **left, "needs": []})
        # The exit code is what the verb returns outside of click's own process.
        assert main(["verify", "--prove-erased", *what, "--disk-dir", str(stopped.folder)]) == 1
    stopped.invoke("evict", "--ns", THEIRS.hex(), "-y")
    for what in ([key], ["--ns", THEIRS.hex()[:16]]):
        answer = stopped.ask("verify", "--prove-erased", *what)
        assert answer.pop("checked") >= 5
        assert answer == {"erased": True, "keys": 0, "blocks": 0, "extents": 0, "needs": []}
    assert stopped.ask("verify", "--prove-erased", stopped.keys[MINE])["blocks"] == 3


def test_a_proof_finds_a_payload_that_no_index_knows(stopped: Stopped) -> None:
    [file] = (stopped.folder / "segments").iterdir()
    size = int(file.stem.split("-")[1])
    data = file.read_bytes()
    stopped.invoke("evict", "--ns", THEIRS.hex(), "-y")
    for number in range(5):
        start = number * size
        if not any(file.read_bytes()[start : start + 8]):
            change_bytes(file, start, partial(old_bytes, data[start : start + size]), size)
    answer = stopped.ask("verify", "--prove-erased", "--ns", THEIRS.hex())
    assert (answer["erased"], answer["extents"], answer["blocks"]) == (False, 2, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prove-erased"],
        ["--ns", "12ab"],
        ["--prove-erased", "12" * 8, "--ns", "12ab"],
        ["--prove-erased", "12" * 8, "--no-repair"],
        ["--prove-erased", "12" * 8, "--sample", "100%"],
        ["--prove-erased", "--ns", "0x12"],
        ["--prove-erased", "12ab"],
        ["--prove-erased", "zz" * 8],
    ],
)
def test_a_proof_of_nothing_is_refused(
    stopped: Stopped, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments, "--disk-dir", str(stopped.folder)]) == 2
    told(capsys.readouterr().err)


def test_a_store_that_is_not_encrypted_has_nothing_to_prove_or_rotate(tmp_path: Path) -> None:
    open_store(tmp_path / "kv", Clock()).close()
    control = StoreControl(tmp_path / "kv")
    with refused(ConfigError):
        control.answer(Verify(erased_key="12" * 8))
    with refused(ConfigError):
        control.answer(Rotate())
    assert control.answer(Df())["disk"]["encryption"] == "off"


def test_without_keys_only_looking_and_emptying_work(stopped: Stopped) -> None:
    [master] = stopped.key_dir.glob("*.master")
    master.unlink()
    control = StoreControl(stopped.folder, key_dir=str(stopped.key_dir))
    disk = control.answer(Df())["disk"]
    assert (disk["blocks"], disk["encryption"]) == (5, "no keys")
    told = "encryption: on, but the keys are not there, so no block can be read"
    assert told in stopped.invoke("df").stdout.splitlines()
    assert sum(len(page) for page in control.pages(Ls())) == 4
    with refused(MissingKeyError):
        control.answer(Verify())
    with refused(MissingKeyError):
        control.answer(Verify(erased_key="12" * 8))
    with refused(MissingKeyError):
        control.answer(Rotate())
    text = stopped.invoke("evict", "--all", "-y").stdout.splitlines()
    assert text[0].startswith("evicted 5 blocks") and text[1].startswith("the store was emptied")
    assert list(stopped.key_dir.iterdir()) == []
    assert control.answer(Df())["disk"]["encryption"] == "off"


def test_df_tells_of_encryption(stopped: Stopped) -> None:
    assert "encryption: on, 2 keys" in stopped.invoke("df").stdout.splitlines()


def test_a_copy_adopts_the_keys_from_the_command_line(stopped: Stopped, tmp_path: Path) -> None:
    shutil.copytree(stopped.folder, tmp_path / "copy")
    open_store(stopped.folder, Clock(), **stopped.options()).close()
    stopped.folder = tmp_path / "copy"
    assert "encryption: on, but the keys are not there" in stopped.invoke("df").stdout
    assert stopped.invoke("adopt").stdout == "The keys belong to this folder now.\n"
    assert stopped.ask("adopt") == {"adopted": False}
    assert stopped.ask("verify")["checked"] == 5


def test_the_master_key_is_rotated_without_rewriting_payloads(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = (stopped.folder / "segments").iterdir()
    [master] = stopped.key_dir.glob("*.master")
    before, key = file.read_bytes(), master.read_bytes()
    assert stopped.ask("rotate") == {"master_key": str(master), "keys": 2}
    assert file.read_bytes() == before
    assert master.read_bytes() != key
    assert stopped.ask("verify") == msgspec.to_builtins(Findings(checked=5))
    given = stopped.key_dir.parent / "given"
    assert stopped.ask("rotate", "--to", str(given))["master_key"] == str(given)
    monkeypatch.setenv("TIEREDKV_DISK_MASTER_KEY", str(given))
    master.unlink()
    assert stopped.ask("verify")["checked"] == 5
    assert (
        main(["rotate", "--to", "a", "--to-command", "b", "--disk-dir", str(stopped.folder)]) == 2
    )


def test_an_admin_key_does_not_rotate_the_master_key() -> None:
    """It would read files of the server's machine, and run a command there."""
    for body in ({"command": "id"}, {}):
        call = admin.respond("rotate", body, Settings(), None, None)  # type: ignore[arg-type]
        with refused(RequestError, code="unknown_url", status=404):
            asyncio.run(call)


def test_a_running_store_is_rotated_and_proved_beside_its_engine(
    harness: Harness, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"encryption": "on", "key_dir": str(tmp_path / "keys")}
    box, chain = Mailbox(harness.open(**options)), make_chain("a", 3)
    box.store(chain)
    control = StoreControl(harness.folder, key_dir=options["key_dir"])
    before = control.answer(Rotate())
    assert before["keys"] == 1
    assert all(done.ok for done in box.load(chain))
    box.client.close()
    box = Mailbox(harness.open(**options))
    assert all(done.ok for done in box.load(chain))
    namespace = chain[0].namespace.hex()
    assert control.answer(Verify(erased_namespace=namespace))["blocks"] == 3
    box.client.close()
    assert control.answer(EvictFilter(namespace_prefix=namespace))["disk"]["evicted_blocks"] == 3
    assert control.answer(Verify(erased_namespace=namespace))["erased"]


def test_an_eviction_names_the_blocks_to_the_engine_by_the_starts_of_their_names(
    harness: Harness, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"encryption": "on", "key_dir": str(tmp_path / "keys")}
    client = harness.open(**options)
    chain = make_chain("a", 3)
    Mailbox(client).store(chain)
    control = StoreControl(harness.folder)
    with engine_that_says(client, {"evicted_blocks": 0, "freed_bytes": 0}) as asked:
        [[listed]] = list(control.pages(Ls()))
        answer = control.answer(EvictFilter(ids=(listed.id,)))
    call = decoded(asked[-1].call)
    assert isinstance(call, EvictFilter)
    assert chain[0].block_hash.hex()[:32] not in listed.id
    assert answer["disk"]["evicted_blocks"] == 3
    assert {*client.names.reveal(call.starts or ())} == {it.block_hash[:16] for it in chain}


def hashes_of(store: Store) -> list[bytes]:
    with store.parts.index.reading() as txn:
        return [name for name, _ in txn.records()]


@pytest.fixture
def no_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key table from which no key can be dropped."""

    def fail(*_: object) -> NoReturn:
        raise StorageError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(KeyTable, "drop", fail)


@pytest.mark.usefixtures("no_drops")
def test_an_eviction_whose_keys_cannot_be_dropped_tells_what_it_did(stopped: Stopped) -> None:
    with open_store(stopped.folder, Clock(), **stopped.options()) as store:
        result = evict(store, EvictFilter(all=True))
        assert (result.evicted_blocks, result.erased_keys) == (5, ())
        assert {*result.kept_keys} == {*stopped.keys.values()}
        assert "Read-only file system" in result.keys_error
        assert store.stats().bytes_pending == 0
        store.check()


@pytest.mark.usefixtures("no_drops")
def test_a_due_rebuild_comes_although_keys_cannot_be_dropped(stopped: Stopped) -> None:
    with open_store(stopped.folder, Clock(), **stopped.options()) as store:
        store.drop(hashes_of(store)[:1], "test")
        store.ask_for_rebuild()
        with pytest.raises(StorageError) as error:
            sweep(store)
        assert error.value.errno == errno.EROFS
        assert store.stats().faults == {"index": 1}
        with store.index.reading() as txn:
            assert not txn.meta.needs_rebuild
        store.check()


@pytest.mark.usefixtures("no_drops")
def test_a_store_whose_unused_keys_cannot_be_dropped_opens(
    stopped: Stopped, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with open_store(stopped.folder, Clock(), **stopped.options()) as store:
            store.drop(hashes_of(store), "test")
    assert [each for each in caplog.messages if "Read-only file system" in each]
    with open_store(stopped.folder, Clock(), **stopped.options()) as store:
        assert store.stats().num_keys == 2
