"""The operator's page over HTTP: its files, its headers, and who may ask for what it shows."""

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.golden import told
from tests.tieredkv.test_app import Engine, answered
from tieredkv.config import Settings
from tieredkv.hashing import tenant_digest
from tieredkv.server import page
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys

FILES = {"/ui": "text/html", "/ui/page.css": "text/css", "/ui/page.js": "text/javascript"}
UI = Path(page.__file__).with_name("ui")
UNSAFE = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("),
    *("cookie", "localStorage", "sessionStorage", "indexedDB", "location", "pushState"),
)
"""What could run what the server sends, or keep the key."""

KEYS = '[alice]\nkey = "a"\nshare = 0.25\n[bob]\nkey = "b"\n[carol]\nkey = "c"\n'


def serve(
    tokenization: Tokenization, *asked: tuple[str, str, dict[str, Any]], **settings: Any
) -> list[httpx.Response]:
    """Send requests (method, path, what httpx takes) to one server; return its answers."""
    chosen = Settings(**settings)
    keys = Keys(settings=chosen, is_strict=False, is_local=True)
    app = build_app(Api(chosen, cast(Any, Engine(0.0, answered)), tokenization, keys))

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.request(method, path, **how) for method, path, how in asked]

    return asyncio.run(send())


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.mark.parametrize("path", FILES)
def test_the_files_are_for_everybody_and_closed_to_everything_else(
    path: str, tokenization: Tokenization
) -> None:
    [answer] = serve(tokenization, ("GET", path, {}), api_keys=("k",), admin_key="operator")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{FILES[path]}; charset=utf-8"
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        **dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'"),
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in answer.headers


def test_the_page_is_small_asks_no_other_server_and_has_no_script_within() -> None:
    texts = {path.name: path.read_text() for path in UI.iterdir()}
    assert texts.keys() == {"index.html", "page.css", "page.js"}
    assert sum(map(len, texts.values())) < 30_000
    urls = {url for text in texts.values() for url in re.findall(r"\w+:/?/[^\s\"'`)]+", text)}
    assert urls == {"http://www.w3.org/2000/svg"}, "which is a name, and is not fetched"
    html = texts["index.html"]
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<img|\saction=", html)
    assert "name=" not in re.sub(r"<meta[^>]*>", "", html), "no field would be in a sent form"
    script = re.sub(r"//.*", "", texts["page.js"])
    assert not [word for word in UNSAFE if word in script]
    assert "import " not in texts["page.js"] and "@import" not in texts["page.css"]


def test_the_page_has_words_for_every_reason_of_a_miss() -> None:
    words = re.search(r"const MISSES = \{(.*?)\};", (UI / "page.js").read_text(), re.DOTALL)
    docs = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    listed = re.search(r"The reasons are (.*?)\. `detail` says", docs, re.DOTALL)
    assert words and listed
    reasons = {*re.findall(r"`([a-z_]+)`", listed[1])}
    assert {*re.findall(r"^  (\w+): \"", words[1], re.MULTILINE)} == reasons
    assert len(reasons) == 15


@pytest.mark.parametrize("name", ["page.py", "..%2Fpage.py", "nothing", "", "page.js/"])
def test_only_the_files_of_the_page_are_sent(name: str, tokenization: Tokenization) -> None:
    [answer] = serve(tokenization, ("GET", f"/ui/{name}", {}))
    assert answer.status_code == 404


def test_the_history_needs_the_admin_key(tokenization: Tokenization) -> None:
    path, settings = "/admin/history", {"api_keys": ("k",), "admin_key": "operator"}
    asked = [("GET", path, each) for each in ({}, bearer("k"), bearer("operator"))]
    answers = serve(tokenization, *asked, **settings)
    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert answers[-1].headers["cache-control"] == "no-store"
    [off] = serve(tokenization, ("GET", path, {}), api_keys=("k",))
    assert off.status_code == 403
    told(off.json()["error"]["message"])


def test_a_part_of_the_history_is_asked_for_by_its_length(tokenization: Tokenization) -> None:
    asked = [("GET", f"/admin/history?last={last}", dict[str, Any]()) for last in ("10m", "soon")]
    good, bad = serve(tokenization, *asked)
    assert (good.status_code, len(good.json()["samples"]), good.json()["slowest"]) == (200, 1, [])
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "last")
    told(bad.json()["error"]["message"])


def test_tenants_are_told_by_name_with_their_shares(
    tokenization: Tokenization, tmp_path: Path
) -> None:
    (file := tmp_path / "keys.toml").write_text(KEYS)
    file.chmod(0o600)
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    *_, answer = serve(
        tokenization,
        ("POST", "/v1/completions", {"json": body, **bearer("b")}),
        ("GET", "/admin/history", bearer("operator")),
        api_keys_file=str(file),
        admin_key="operator",
        api_keys=("given-as-a-flag",),
    )
    tenants = {tenant["name"]: tenant for tenant in answer.json()["tenants"]}
    assert tenants.keys() == {"alice", "bob"}, "carol has no share and has asked for nothing"
    assert tenants["alice"]["share"] == 0.25
    assert (tenants["bob"]["num_answers"], tenants["alice"]["num_answers"]) == (1, 0)
    [slow] = answer.json()["slowest"]
    assert (slow["tenant"], slow["prompt_tokens"]) == ("bob", tenants["bob"]["prompt_tokens"])
    assert tenants["bob"]["id"] == tenant_digest(hashlib.sha256(b"b").hexdigest()).hex()
