"""The command line in real processes: exit codes, one-line errors and JSON."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from tests.fakes import FakeClock
from tests.golden import told
from tests.serving import COMMAND, heed_ctrl_c, tieredkv
from tests.storage.blocks import digest, make_record, open_store, put
from tests.test_readme import leaves
from tests.waiting import HANG_S, wait_until
from tieredkv.cli import doctor, output
from tieredkv.cli.main import cli
from tieredkv.cli.main import main as run_main
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.errors import (
    ConfigError,
    ModelError,
    StorageError,
    StoreBusyError,
    StoreUnreachableError,
    TieredKVError,
)
from tieredkv.operate import calls
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, Ls
from tieredkv.operate.chain_ids import short_id
from tieredkv.operate.verb import Asking
from tieredkv.operate.verify import Findings
from tieredkv.storage import starts
from tieredkv.units import format_duration

VERBS = ["serve", "generate", "bench ttft", *calls.VERBS, "doctor", "config show"]


def test_without_arguments_it_teaches() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    for verb in VERBS:
        assert f"tieredkv {verb}" in result.output


def test_the_command_line_has_the_verbs_of_the_table() -> None:
    assert {*calls.VERBS} - {*cli.commands} == set()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str) -> None:
    result = CliRunner().invoke(cli, [*verb.split(), "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output
    assert re.search(rf"\n  Examples?:\n    (.* )?tieredkv {verb}", result.output), result.output


REPEATED = {
    "allowed_hosts": "--allowed-host",
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
}


def test_every_setting_has_a_flag_that_names_its_default() -> None:
    text = " ".join(CliRunner().invoke(cli, ["serve", "--help"]).output.split())
    for name, field in Settings.__dataclass_fields__.items():
        if field.metadata["section"] and name != "model":
            flag = REPEATED.get(name, f"--{name.replace('_', '-')}")
            assert re.search(rf"{flag}\b", text), name
    for flag in ("--host-size", "--load-timeout"):
        [shown] = re.finditer(rf"{flag}(, --[a-z-]+)? [A-Z]+ .*?\]", text)
        told(shown[0])


def test_every_help_text_is_made_of_complete_sentences() -> None:
    texts = {path: command.help or "" for path, command in leaves(cli).items()}
    for path, command in leaves(cli).items():
        for option in command.params:
            if isinstance(option, click.Option):
                texts[f"{path} {option.opts[0]}"] = option.help or ""
    assert len(texts) > 150
    for name, text in texts.items():
        first = text.partition("\n\n")[0]
        assert re.fullmatch(r"(`/|[A-Z]).*\.", first, re.DOTALL), (name, first)
        assert ", e.g. " not in first, name


def test_a_verb_loads_only_the_libraries_that_it_needs() -> None:
    code = (
        "import sys; from tieredkv.cli.main import main; code = main(['ls', '--help']); "
        "bad = {'numpy', 'httpx', 'asyncio'} & {*sys.modules}; "
        "import tieredkv.sizing.sweep; code |= main(['serve', '--help']); "
        "bad |= {'torch', 'transformers', 'starlette', 'uvicorn'} & {*sys.modules}; "
        "sys.exit(', '.join(sorted(bad)) or code)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


WRONG = [
    ["df"],
    ["df", "--disk-dir", "/no/where"],
    ["config", "show", "--port", "x"],
    ["evict", "--disk-dir", "."],
    ["evict", "--disk-dir", ".", "--all", "--ns", "a"],
    ["evict", "--disk-dir", ".", "--filter", "sise>1"],
    ["prune", "--disk-dir", "."],
    ["prune", "--disk-dir", ".", "--model", "", "-y"],
    ["verify", "--disk-dir", ".", "--sample", "some"],
    ["evict", "--disk-dir", ".", "--older-than", "soon"],
]
WRONG_FOR_CLICK = [
    ["nope"],
    ["serve"],
    ["prune"],
    ["serve", "tiny-random", "--restore", "x"],
    ["bench", "ttft", "--model", "m", "--prefix-tokens", "a"],
]
"""What the library refuses, in words of its own."""


@pytest.mark.parametrize("arguments", [*WRONG, *WRONG_FOR_CLICK], ids=" ".join)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    if arguments in WRONG:
        told(captured.err)
    assert captured.err.startswith("error: ")
    assert all(rest.startswith("hint: ") for rest in captured.err.splitlines()[1:])


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("a"), 2),
        (ModelError("a"), 2),
        (StorageError("a"), 1),
        (StoreBusyError("a"), 1),
        (StoreUnreachableError("a"), 3),
        (TieredKVError("a"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_has_its_exit_code(
    error: BaseException, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.commands["doctor"], "callback", fail)
    assert run_main(["doctor"]) == exit_code


def test_an_interruption_while_a_class_is_made_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may make another error of it, and much of a start is the making of classes."""

    class Interrupting:
        def __set_name__(self, *_: object) -> None:
            raise KeyboardInterrupt

    def make_one(**_: object) -> None:
        type("Made", (), {"field": Interrupting()})

    monkeypatch.setattr(cli.commands["doctor"], "callback", make_one)
    assert run_main(["doctor"]) == 130


def test_config_show_names_the_source_of_every_value_and_no_key(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[cache]\nhost_size = "2GiB"\n[server]\napi_keys = ["secret"]\n')
    result = tieredkv(
        "config", "show", "--config", str(file), "--port", "81", "--json", TIEREDKV_BLOCK_SIZE="32"
    )
    settings = json.loads(result.stdout.splitlines()[-1])["settings"]
    assert settings["port"] == {"value": 81, "source": "argument"}
    assert settings["block_size"] == {"value": 32, "source": "environment TIEREDKV_BLOCK_SIZE"}
    assert settings["host_size"] == {"value": 2 << 30, "source": f"file {file}"}
    assert settings["seed"] == {"value": 0, "source": "default"}
    assert "secret" not in result.stdout


def test_an_unknown_key_in_a_config_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[cache]\nblok_size = 16\n")
    result = tieredkv("serve", "tiny-random", "--config", str(file))
    assert result.returncode == 2
    told(result.stderr, hide={str(file): "FILE"})
    assert len(result.stderr.splitlines()) == 1


def test_doctor_says_what_the_disk_can_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    checks = json.loads(tieredkv("doctor", "--disk-dir", str(tmp_path), "--json").stdout)["checks"]
    names = {check["name"]: check["status"] for check in checks}
    assert {"python", "torch", "cuda" if "cuda" in names else "cuda:0"} <= set(names)
    assert names["permissions"] == "ok"
    calls = {
        "O_DIRECT",
        "fallocate",
        "hole punching",
        "shared mmap",
        "fdatasync",
        "flock",
        "rename",
    }
    assert {*calls, "free space", "disk to host memory", "learnt rates"} <= set(names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_doctor_tells_the_plans_for_a_model_by_the_rates_that_a_server_has_left(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = json.loads((stored / "rates.json").read_text())
    saved["read_bytes_per_s"] = 40e6
    (stored / "rates.json").write_text(json.dumps(saved))
    words = ["doctor", "tiny-random", "--disk-dir", str(stored), "--json"]
    assert run_main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == 0
    assert document["rates"]["learnt"]["disk_read_GBps"] == 0.04
    assert document["rates"]["learnt"]["model"] == "tiny-random"
    from_disk = [each for each in document["plans"] if each["tier"] == "disk"]
    assert [each["prefix_tokens"] for each in from_disk] == [2048, 8192, 32_704]
    for plan in from_disk:
        load_ms = plan["prefix_tokens"] * 2048 / 40e6 * 1000
        assert load_ms <= plan["load_ms"]
        assert 0 < plan["planned_ms"] <= 1.001 * min(plan["compute_ms"], plan["load_ms"])
        assert 0 <= plan["split_token"] <= plan["prefix_tokens"]
    details = {check["name"]: check["detail"] for check in document["checks"]}
    assert "disk 0.04 GB/s" in details["learnt rates"]
    assert "planned" in details["2,048 tokens on disk"]
    monkeypatch.setenv("TIEREDKV_DISK_READ_LIMIT", "1KiB")
    assert run_main(words) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {it["split_token"] for it in plans if it["tier"] == "disk"} == {2048, 8192, 32_704}


def test_doctor_says_whether_a_start_could_use_the_folder_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(key_dir: Path) -> tuple[str, str]:
        _, status, detail = doctor.check_keys(str(tmp_path / "kv"), str(key_dir))
        return status, detail

    monkeypatch.setattr(starts, "_device_of", lambda path: Path(path).name)
    assert check(tmp_path / "keys")[0] == "ok"
    assert "another volume" in check(tmp_path / "keys")[1]
    assert "protects copies of that folder" in check(tmp_path / "elsewhere" / "kv")[1]
    (tmp_path / "file").touch()
    status, detail = check(tmp_path / "file")
    assert status == "fail" and "disk_key_dir" in detail
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_doctor_fails_where_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    result = tieredkv("doctor", "--disk-dir", str(tmp_path), "--json")
    assert result.returncode == 1
    [failed] = [it for it in json.loads(result.stdout)["checks"] if it["status"] == "fail"]
    assert failed["name"] == "permissions"
    told(failed["detail"], hide={str(tmp_path): "FOLDER"})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stopped store with one chain of 20 blocks."""
    folder = tmp_path_factory.mktemp("cli") / "store"
    words = ["generate", "tiny-random", "--max-tokens", "2", "--disk-dir", str(folder), "--json"]
    words += ["--default-retention", "24h", "--host-size", "8MiB", "--device-size", "8MiB"]
    command = [*COMMAND, *words]  # in a process of its own, which may write nothing to stderr
    result = subprocess.run(command, input="x" * 330, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 1, "where its master key was made"
    [output] = json.loads(result.stdout.splitlines()[-1])["outputs"]
    assert output["usage"]["prompt_tokens"] == 330
    assert len(output["token_ids"]) == 2
    return folder


def ask(folder: Path, verb: str, *arguments: str) -> dict[str, object]:
    """Run a verb on a store with --json; it must succeed. Return its answer."""
    result = tieredkv(verb, "--disk-dir", str(folder), *arguments, "--json")
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_a_flipped_byte_is_found_counted_and_exit_code_1(stored: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    [segment] = [path for path in copy.rglob("*") if path.stat().st_size > 20 * 16 * 2048]
    with segment.open("r+b") as file:
        file.seek(10_000)
        byte = file.read(1)[0]
        file.seek(10_000)
        file.write(bytes([byte ^ 1]))
    found = tieredkv("verify", "--disk-dir", str(copy), "--json")
    assert found.returncode == 1
    counts = json.loads(found.stdout.splitlines()[-1])
    assert (counts["checked"], counts["bad"], counts["repaired"]) == (20, 1, 1)
    assert sum(counts["by_reason"].values()) == 1
    assert ask(copy, "verify")["checked"] == 19


def test_the_verbs_of_a_stopped_store_keep_their_contracts(stored: Path) -> None:
    df = ask(stored, "df")
    assert (df["device"], df["host"], df["writer_pid"]) == (None, None, None)
    disk = df["disk"]
    assert isinstance(disk, dict)
    assert disk["blocks"] == 20
    assert disk["bytes_live"] == 20 * 16 * 2048
    assert {"bytes_files", "bytes_budget"} <= set(disk)

    chains = ask(stored, "ls")["chains"]
    assert isinstance(chains, list)
    assert [chain["blocks"] for chain in chains] == [20]
    assert ask(stored, "verify") == msgspec.to_builtins(Findings(checked=20))
    told(tieredkv("verify", "--disk-dir", str(stored)).stdout)
    table = tieredkv("ls", "--disk-dir", str(stored))
    assert short_id(chains[0]["id"], 12) in table.stdout

    idle = tieredkv("evict", "--disk-dir", str(stored), "--older-than", "1h", "-y")
    assert (idle.returncode, idle.stdout) == (1, "")
    told(idle.stderr)
    some = ask(stored, "evict", "--model", "tiny-random", "--filter", "tier=disk", "--dry-run")
    assert some["evicted_blocks"] == 20
    other = tieredkv("evict", "--disk-dir", str(stored), "--model", "other", "-y")
    assert other.returncode == 1
    planned = ask(stored, "evict", "--all", "--dry-run")
    assert (planned["evicted_blocks"], planned["dry_run"]) == (20, True)
    refused = tieredkv("evict", "--disk-dir", str(stored), "--all")
    assert refused.returncode == 2
    told(refused.stderr)
    unknown = tieredkv("evict", "--disk-dir", str(stored), "abcdef", "-y")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    told(unknown.stderr)

    comma = tieredkv("evict", "--disk-dir", str(stored), "--model", "a,tier=disk", "-y")
    assert (comma.returncode, comma.stdout) == (1, "")
    for empty in ("--ns", "--filter", "--model"):  # as with a variable that was not set
        nothing = tieredkv("evict", "--disk-dir", str(stored), "--older-than", "0", empty, "", "-y")
        assert (nothing.returncode, nothing.stdout) == (2, "")
    assert ask(stored, "ls")["chains"] == chains

    short = tieredkv("evict", "--disk-dir", str(stored), chains[0]["id"][:7], "-y")
    assert short.returncode == 1
    told(short.stderr, hide={chains[0]["id"][:7]: "ID"})

    evicted = ask(stored, "evict", chains[0]["id"][:16], "-y")
    assert evicted["evicted_blocks"] == 20
    assert evicted["freed_bytes"] == planned["freed_bytes"]
    assert ask(stored, "ls") == {"chains": [], "needs": []}
    told(tieredkv("ls", "--disk-dir", str(stored)).stdout)


def test_df_tells_how_long_the_disk_keeps_blocks_and_warns_of_a_small_one(tmp_path: Path) -> None:
    clock, path = FakeClock(time.time() - 3000), tmp_path / "store"
    with open_store(path, clock, budget_bytes=3 << 20) as store:
        for i in range(300):
            put(store, make_record(f"{i}", now=clock.now()))
            clock.advance(10)
    shown = tieredkv("df", "--disk-dir", str(path), "-v")
    assert shown.returncode == 0
    lifetimes = ask(path, "df")["disk"]["lifetimes"]  # type: ignore[index]
    [row] = [line.split() for line in shown.stdout.splitlines() if line.startswith(" 24h ")]
    assert (row[0], row[2:4]) == ("24h", ["KiB", "1d"])
    assert float(row[1]) == pytest.approx(12_288 / 10 / 1024, rel=0.01)
    assert str(lifetimes["num_evicted"]["24h"]) in row
    assert format_duration(lifetimes["evicted_age_p1_s"]["24h"]) in " ".join(row)
    changing = r"[\d.]+ KiB|\d+m( \d+s)?|[\d.]+ MiB(?=` would)"
    told(re.sub(changing, "N", shown.stdout.splitlines()[-1]))
    assert f" {digest('tenant').hex()[:16]} " in shown.stdout


def test_df_of_a_server_of_an_older_version_says_what_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    with open_store(path, FakeClock(time.time()), budget_bytes=3 << 20) as store:
        put(store, make_record("a", now=time.time()))
    answer = StoreControl(path).answer(Df())
    for name in ("lifetimes", "encryption"):
        del answer["disk"][name]
    monkeypatch.setattr(StoreControl, "answer", lambda _, call: answer)
    shown = tieredkv("df", "--disk-dir", str(path))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert ["disk", "1"] in [line.split()[:2] for line in shown.stdout.splitlines()]
    told(shown.stdout.splitlines()[-1])
    assert ask(path, "df") == answer


def test_ls_warns_where_the_engine_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pages(control: StoreControl, call: Ls) -> Asking:
        yield from ()
        return {"engine": "no answer"}

    monkeypatch.setattr(StoreControl, "pages", pages)
    for words in ((), ("--json",), ("-q",)):
        shown = tieredkv("ls", "--disk-dir", str(tmp_path), *words)
        assert shown.returncode == 0
        told(shown.stderr)
    assert ask(tmp_path, "ls") == {"chains": [], "engine": "no answer"}


def test_quiet_verbs_print_errors_and_ids_only(tmp_path: Path) -> None:
    path, now = tmp_path / "store", time.time()
    with open_store(path, FakeClock(now), budget_bytes=3 << 20) as store:
        put(store, *(make_record("chain", i, now=now) for i in range(20)))
    folder = ("--disk-dir", str(path))
    [chain] = StoreControl(path).pages(Ls())
    assert tieredkv("ls", *folder, "-q").stdout == f"{chain[0].id}\n"
    assert tieredkv("ls", *folder, "-q", "--filter", "blocks>20").stdout == ""
    for words in (("df", *folder), ("verify", *folder), ("evict", *folder, "--all", "--dry-run")):
        shown = tieredkv(*words, "--quiet")
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")
    nothing = tieredkv("evict", *folder, "--older-than", "1h", "-y", "-q")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    told(nothing.stderr)
    assert json.loads(tieredkv("df", *folder, "-q", "--json").stdout)["disk"]["blocks"] == 20


def test_namespaces_of_one_tenant_are_told_apart(tmp_path: Path) -> None:
    path, now = tmp_path / "store", time.time()
    spaces = [digest("tenant")[:8] + digest(salt)[:24] for salt in ("one", "other")]
    with open_store(path, FakeClock(now), budget_bytes=3 << 20) as store:
        put(store, *(make_record(f"{it!r}", now=now, namespace=it, root=it) for it in spaces))
    for words in (["df", "-v"], ["ls"]):
        rows = tieredkv(*words, "--disk-dir", str(path)).stdout.split()
        shown = [word for word in rows if len(word) == 24]
        assert sorted(shown) == sorted(each.hex()[:24] for each in spaces)
    assert ask(path, "evict", "--ns", shown[0], "-y")["evicted_blocks"] == 1
    [left] = [chain for page in StoreControl(path).pages(Ls()) for chain in page]
    assert left.namespace[:24] == shown[1]


def test_a_row_becomes_a_paragraph_where_the_table_is_too_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": "1f9c", "last_hit": "1h 2m", "hits": 3}]
    output.print_table(rows)
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "1f9c" in line] == [
        ["1f9c", "1h", "2m", "3"]
    ]
    monkeypatch.setattr(output, "PIPE_COLUMNS", 18)
    output.print_table(rows)
    assert capsys.readouterr().out == "1f9c\n  last hit 1h 2m,\n  hits 3\n"


def test_a_name_from_a_store_neither_formats_a_table_nor_moves_the_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"retention": "[/x]\x1b[2J", "by_reason": {"\rx": 1}}]
    output.print_table(rows)
    assert r"[/x]\x1b[2J   \rx 1" in capsys.readouterr().out
    monkeypatch.setattr(output, "PIPE_COLUMNS", 18)
    output.print_table(rows)
    assert capsys.readouterr().out == "[/x]\\x1b[2J\n  by reason \\rx 1\n"


def test_a_long_list_is_printed_while_it_is_made_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    now, path = time.time(), tmp_path / "store"
    records = [make_record(f"{i}", now=now, size_bytes=1) for i in range(1200)]
    with open_store(path, Clock(), budget_bytes=64 << 20) as store:
        for start in range(0, len(records), 400):
            put(store, *records[start : start + 400])
    ids = {chain["id"] for chain in ask(path, "ls")["chains"]}  # type: ignore[attr-defined]
    assert len(ids) == 1200
    assert len(ask(path, "ls", "--limit", "2")["chains"]) == 2  # type: ignore[arg-type]
    table = tieredkv("ls", "--disk-dir", str(path)).stdout
    assert all(short_id(chain, 12) in table for chain in ids)
    for more in (["--json"], []):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tieredkv", "ls", "--disk-dir", str(path), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=heed_ctrl_c,
        )
        assert process.stdout is not None
        assert len(process.stdout.read(1000)) == 1000  # the rest does not fit into the pipe
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert (process.returncode, told.strip()) == (130, b"")
        with open_store(path, Clock(), budget_bytes=None):
            pass  # no other process holds the store


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    words = [sys.executable, "-P", "-m", "tieredkv", "config", "show"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    told(done.stderr)


@pytest.mark.parametrize(
    ("fd", "words", "exit_code", "is_told"),
    [
        (0, ["warm", "-"], 2, True),
        (1, ["ls"], 1, True),
        (1, ["ls", "-q"], 0, False),
        (1, ["--help"], 1, True),
        (2, ["ls", "--filter", "nope"], 2, False),
    ],
)
def test_a_closed_standard_stream_is_no_fault(
    fd: int, words: list[str], exit_code: int, is_told: bool, tmp_path: Path
) -> None:
    with open_store(tmp_path / "store", Clock()):
        pass
    where = ["--disk-dir", str(tmp_path / "store")] if words[0] == "ls" else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tieredkv", *words, *where],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.close(fd),
    )
    assert done.returncode == exit_code
    assert done.stdout == ""
    assert bool(done.stderr) == is_told
    if is_told:
        told(done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_and_options(shell: str) -> None:
    assert f"{shell}_source" in CliRunner().invoke(cli, ["--help"]).output
    command = [sys.executable, "-P", "-c", "from tieredkv.cli import run; run()"]

    def complete(line: str, word: str) -> str:
        index = str(word if shell == "fish" else len(line.split(" ")) - 1)
        words = {"COMP_WORDS": line, "COMP_CWORD": index}
        env = {**os.environ, **words, "_TIEREDKV_COMPLETE": f"{shell}_complete"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert "evict" in complete("tieredkv ev", "ev")
    assert "--older-than" in complete("tieredkv evict --old", "--old")


@pytest.mark.parametrize("group", ["bench", "config"])
def test_a_group_without_a_verb_shows_its_verbs(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main([group]) == 2
    assert capsys.readouterr().err.startswith(f"Usage: tieredkv {group} ")


@pytest.mark.parametrize("verb", ["df", "ls", "evict --all -y", "verify", "rotate", "top"])
def test_a_store_of_another_account_is_named(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert run_main([*verb.split(), "--disk-dir", str(tmp_path)]) == 1
    told(capsys.readouterr().err)


def test_a_socket_of_another_account_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    os.mknod(tmp_path / "sock", stat.S_IFSOCK | 0o600)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert run_main(["df", "--disk-dir", str(tmp_path)]) == 1
    told(capsys.readouterr().err)


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("no trace")
    assert run_main(["size", str(trace), "--plot", str(tmp_path / "a.png")]) == 2
    told(capsys.readouterr().err, hide={str(tmp_path): "FOLDER"})


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for verb in ("df", "ls", "verify"):
        result = tieredkv(verb, "--disk-dir", str(tmp_path))
        assert result.returncode == 2
        told(result.stderr, hide={str(tmp_path): "FOLDER"})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_ctrl_c_ends_a_load_and_a_turned_clock_is_announced() -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tieredkv", "serve", "tiny-random", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TIEREDKV_TEST_CLOCK_OFFSET_FILE": "/no/file"},
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: bool(children.read_text()), "no engine is started", process=process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HANG_S)
    assert "Traceback" not in stderr
    assert process.returncode == 0
    told(stderr.splitlines()[0])
