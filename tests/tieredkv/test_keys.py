"""Key files, valid and invalid, and the host names that a server answers to."""

import hashlib
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from tests.golden import refused
from tieredkv.config import Settings, child_environment
from tieredkv.errors import ConfigError, RequestError
from tieredkv.server.keys import MAX_FILE_BYTES, Keys


def keys_of(path: Path | None, *, is_local: bool = True, **settings: Any) -> Keys:
    file = None if path is None else str(path)
    asked = Settings(api_keys_file=file, **settings)
    return Keys(settings=asked, is_strict=False, is_local=is_local)


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.touch(0o600)
    path.write_text(text)
    return path


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        '[a]\nkey = "sk-s"\n[b]\nkey = "sk-s"',
        f'[a]\nkey = "sk-s"\n[b]\nkey_sha256 = "{digest_of("sk-s")}"',
        '[a]\nkey = "sk-flag"',
        '[a]\nkey = "sk-s"\n[b]\nkey = " "',
        '[a]\nkey = "\\u00a0"',
        '[a]\nkey = "sk-s\\n"',
        '[a]\nkey = ""',
        f'[a]\nkey_sha256 = "{digest_of("")}"',
        '[a]\nkey = "sk-s"\nshare = "sk-s"',
        'a = "sk-s"',
        '[a]\nkey = "sk-s',
    ],
)
def test_a_bad_file_is_refused_by_its_table_and_never_shows_a_key(
    text: str, tmp_path: Path
) -> None:
    with refused(ConfigError) as caught:
        keys_of(write(tmp_path, text), api_keys=("sk-flag",))
    assert not {"sk-s", "sk-flag"} & {*str(caught.value).replace('"', " ").split()}
    assert "sk-s" not in str(caught.value) and "sk-flag" not in str(caught.value)


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe, 0o600)
    large.touch(0o600)
    os.truncate(large, MAX_FILE_BYTES + 1)
    for path in (pipe, Path("/dev/zero"), tmp_path, large, tmp_path / "none"):
        with refused(ConfigError):
            keys_of(path)
    link = tmp_path / "link"
    link.symlink_to(write(tmp_path, '[a]\nkey = "sk-a"'))
    assert keys_of(link).tenant({"x-api-key": "sk-a"}) == digest_of("sk-a")


def test_a_file_that_was_read_has_no_effect_until_it_is_adopted(tmp_path: Path) -> None:
    path = write(tmp_path, '[a]\nkey = "sk-a"\nshare = 0.5')
    keys, old, new = keys_of(path), {"x-api-key": "sk-a"}, {"x-api-key": "sk-b"}
    write(tmp_path, '[b]\nkey = "sk-b"\nadmin = true')
    thread = threading.Thread(target=lambda: read.append(keys.read()))
    read: list[Any] = []
    thread.start()
    thread.join()
    assert keys.tenant(old) == digest_of("sk-a") and keys.shares == {digest_of("sk-a"): 0.5}
    keys.adopt(read[0])
    assert keys.tenant(new) == digest_of("sk-b") and keys.shares == {}
    keys.check_operator(new)
    with pytest.raises(RequestError):
        keys.tenant(old)


@pytest.mark.parametrize("name", ["api_keys", "admin_key"])
def test_a_key_that_is_blank_or_no_text_is_refused_without_being_shown(name: str) -> None:
    blank: Any = (" ",) if name == "api_keys" else "\t"
    with refused(ConfigError):
        Settings(**{name: blank})


def test_settings_do_not_show_their_keys() -> None:
    settings = Settings(api_keys=("sk-a",), admin_key="sk-b")
    assert "sk-" not in repr(settings) and "port=8000" in repr(settings)


def test_the_environment_of_children_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEYS", "ADMIN_KEY", "PORT"):
        monkeypatch.setenv(f"TIEREDKV_{name}", "sk-a")
    given = child_environment()
    assert {name for name in os.environ if name not in given} == {
        "TIEREDKV_API_KEYS",
        "TIEREDKV_ADMIN_KEY",
    }


LOCAL = ("localhost", "127.0.0.1", "[::1]", "LocalHost", "localhost:8000", "[::1]:1", "127.0.0.1:")
FOREIGN = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "[::2]", "::1")
ODD = ("0.0.0.0", "localhost:80a", "[::1", "", "a@localhost", "localhost@a", "localhost,a")


@pytest.mark.parametrize("path", ["/v1/models", "/admin/cache/df", "/metrics", "/nothing"])
def test_without_keys_on_loopback_only_its_own_names_are_answered(path: str) -> None:
    keys = keys_of(None)
    for host in LOCAL:
        keys.check_host(path, {"host": host})
    for host in (*FOREIGN, *ODD):
        with refused(RequestError, code="host_not_allowed", status=403) as caught:
            keys.check_host(path, {"host": host})
        assert (caught.value.status, caught.value.code) == (403, "host_not_allowed")
    with pytest.raises(RequestError):
        keys.check_host(path, {})


def test_a_probe_may_leave_the_host_out_but_not_give_another() -> None:
    keys = keys_of(None)
    keys.check_host("/health", {})
    with pytest.raises(RequestError):
        keys.check_host("/health", {"host": "evil.example"})


def test_the_configured_address_is_an_allowed_host() -> None:
    keys_of(None, host="127.0.0.7").check_host("/version", {"host": "127.0.0.7:80"})
    keys_of(None, host="::1").check_host("/version", {"host": "[::1]:80"})


@pytest.mark.parametrize("settings", [{"api_keys": ("sk-a",)}, {"is_local": False}])
def test_any_host_may_be_named_with_keys_or_on_an_open_address(settings: dict[str, Any]) -> None:
    for host in (*LOCAL, *FOREIGN):
        keys_of(None, **settings).check_host("/version", {"host": host})


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("sk-a",)}, {"is_local": False}])
def test_allowed_hosts_hold_wherever_they_are_given(settings: dict[str, Any]) -> None:
    keys = keys_of(None, allowed_hosts=("KV.example.com", "[2001:db8::1]"), **settings)
    for host in ("kv.example.com", "kv.example.com:443", "[2001:DB8::1]:8000", *LOCAL):
        keys.check_host("/version", {"host": host})
    for host in FOREIGN:
        with refused(RequestError, code="host_not_allowed", status=403):
            keys.check_host("/version", {"host": host})
    keys_of(None, allowed_hosts=("*",), **settings).check_host("/version", {"host": "any"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_hosts", "kv.example.com:80"),
        ("allowed_hosts", "https://kv.example.com"),
        ("allowed_hosts", ""),
        ("allowed_hosts", "*.example.com"),
        ("cors_origins", "https://example.com/"),
        ("cors_origins", "example.com"),
        ("cors_origins", "null"),
        ("cors_origins", ""),
    ],
)
def test_hosts_and_origins_that_could_never_match_are_refused(name: str, value: str) -> None:
    with refused(ConfigError):
        Settings(**cast(Any, {name: (value,)}))
