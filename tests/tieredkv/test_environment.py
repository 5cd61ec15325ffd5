"""What the environment can bend: rights, names of folders, encodings, and an early Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import refused, told
from tests.serving import tieredkv
from tests.unprivileged import unprivileged
from tieredkv.config import load_settings
from tieredkv.errors import ConfigError


def test_ctrl_c_while_the_command_line_is_imported_prints_nothing() -> None:
    code = (
        "import os, signal, sys; from tieredkv import cli\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'tieredkv.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder()); cli.run()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    ignoring = code.replace("signal.default_int_handler", "signal.SIG_IGN")
    words = [sys.executable, "-P", "-c", ignoring, "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["df", "ls", "verify", "prune -y", "top --once", "rotate"])
def test_a_store_in_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, verb: str) -> None:
    outer, folder = tmp_path / "outer", tmp_path / "outer" / "kv"
    folder.mkdir(parents=True)
    outer.chmod(0)
    with unprivileged():
        done = tieredkv(*verb.split(), "--disk-dir", str(folder))
    outer.chmod(0o700)
    assert done.returncode in (1, 2)
    told(done.stderr, hide={str(folder): "FOLDER"})


@pytest.mark.parametrize("verb", ["df", "ls", "verify", "evict --all -y", "inspect 12345678"])
def test_a_folder_without_a_store_is_a_wrong_usage(tmp_path: Path, verb: str) -> None:
    done = tieredkv(*verb.split(), "--disk-dir", str(tmp_path))
    assert done.returncode == 2
    told(done.stderr, hide={str(tmp_path): "FOLDER"})


def test_doctor_takes_a_folder_that_a_server_would_make(tmp_path: Path) -> None:
    folder = tmp_path / "nvme" / "kv"
    done = tieredkv("doctor", "--disk-dir", str(folder), "--json")
    checks = {it["name"]: it for it in json.loads(done.stdout)["checks"]}
    assert checks["disk folder"]["status"] == "ok"
    assert "hole punching" in checks and list(tmp_path.iterdir()) == []
    (tmp_path / "ro").mkdir(0o555)
    with unprivileged():
        done = tieredkv("doctor", "--disk-dir", str(tmp_path / "ro" / "kv"), "--json")
    failed = [it for it in json.loads(done.stdout)["checks"] if it["status"] == "fail"]
    assert [it["name"] for it in failed] == ["disk folder"]
    told(failed[0]["detail"])


@pytest.mark.parametrize("bench", ["ttft", "restore", "returns", "sessions"])
def test_a_bench_makes_its_folder_as_a_server_does(bench: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kv"
    done = tieredkv("bench", bench, "--model", "no/such/model", "--disk-dir", str(folder))
    assert done.returncode == 2 and "no/such/model" in done.stderr
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    words = ("bench", bench, "--model", "tiny-random", "--disk-dir", str(tmp_path / "file"))
    done = tieredkv(*words)
    assert done.returncode == 2
    told(done.stderr, hide={str(tmp_path / "file"): "FILE"})


@pytest.mark.parametrize("name", ["disk_dir", "disk_key_dir", "disk_master_key", "api_keys_file"])
def test_a_path_may_begin_with_the_home_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/kv")
    section = "server" if name == "api_keys_file" else "cache"
    file = tmp_path / "c.toml"
    file.write_text(f'[{section}]\n{name} = "~/a"\n')
    settings = load_settings(config_path=file, environ={}).settings
    assert getattr(settings, name) == "/home/kv/a"
    for value, path in (("./~", "./~"), ("a/~", "a/~"), ("", None)):
        settings = load_settings(arguments={name: value}, environ={}).settings
        assert getattr(settings, name) == path
    with refused(ConfigError):
        load_settings(arguments={name: "~nobody-here/a"}, environ={})


def test_names_that_are_no_text_are_refused() -> None:
    folder = os.fsdecode(b"/tmp/by\xffte")
    done = tieredkv("df", "--disk-dir", folder)
    assert done.returncode == 2
    told(done.stderr, hide={"/tmp/by\ufffdte": "FOLDER"})


def test_output_that_knows_no_letters_but_ascii_escapes_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "k\u00e4se"
    folder.mkdir()
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-P", "-m", "tieredkv"]
    words += ["config", "show", str(folder), "--json"]
    done = subprocess.run(words, capture_output=True, env=environ)
    assert json.loads(done.stdout)["settings"]["model"]["value"] == str(folder)
    done = subprocess.run(words[:-1], capture_output=True, env=environ)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"k\xe4se" in done.stdout
