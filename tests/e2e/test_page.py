"""The operator's page in a real browser, on a real server; needs playwright and a Chromium.

`make test-full` installs playwright. The browser is playwright's own or one of the system.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import http
from tests.serving import Server, running
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

OPERATOR = "operator-kéy"
HOSTILE = "<img src=x onerror=alert(1)>"
KEYS = f"""
[alice]
key = "alice-key"
share = 0.25

["{HOSTILE}"]
key = "hostile-key"
"""
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
RESULT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: playwright's own, or else one of the system."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium
        paths = [chromium.executable_path, *(shutil.which(name) or "" for name in BROWSERS)]
        path = next((path for path in paths if path and Path(path).exists()), None)
        if path is None:
            pytest.skip("there is no Chromium: run `playwright install chromium`")
        # Chromium's sandbox needs rights that a container may not have; only our page is opened.
        browser = chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two tenants, each of which has asked for something."""
    folder = tmp_path_factory.mktemp("page")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    flags = ("--api-keys-file", str(keys), "--admin-key", OPERATOR, "--disk-write", "write_behind")
    with running(folder, *flags) as server:
        for key, num_words in (("alice-key", 60), ("alice-key", 60), ("hostile-key", 30)):
            body = {"model": "tiny-random", "prompt": f"{key} speaks " * num_words, "max_tokens": 2}
            headers = {"Authorization": f"Bearer {key}"}
            answer = http.post(f"{server.url}/completions", json=body, headers=headers)
            assert answer.status_code == 200
        wait_until(lambda: server.df()["disk"]["blocks"] > 60, "blocks on disk")
        yield server


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, before the key is given; it may raise no error and ask no other server."""
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    page = context.new_page()
    problems, asked = list[str](), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.root}/ui")
    yield page
    assert not problems
    assert {"/ui", "/ui/page.css", "/ui/page.js"} <= {
        url.removeprefix(server.root) for url in asked
    }
    assert all(url.startswith(server.root) for url in asked)
    assert not any("key" in url or "k%C3" in url for url in asked)
    assert context.cookies() == []
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
    assert page.url == f"{server.root}/ui"
    context.close()


def sign_in(page: Any, key: str = OPERATOR) -> None:
    page.fill("#key", key)
    page.click("#sign-in button")


def table(page: Any, name: str) -> list[list[str]]:
    """Return the texts of the cells of a table's rows, once it has any."""
    page.wait_for_selector(f"#{name} tbody tr", timeout=RESULT_MS)
    rows: list[list[str]] = page.eval_on_selector_all(
        f"#{name} tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    return rows


def test_nothing_is_shown_without_the_key(page: Any) -> None:
    sign_in(page, "wrong")
    wait_until(lambda: page.text_content("#status") == "Incorrect API key provided.", "a refusal")
    assert not page.is_visible("#figures")
    assert page.input_value("#key") == ""


def test_it_shows_tiers_savings_times_and_tenants(page: Any) -> None:
    sign_in(page)
    largest = table(page, "largest")
    assert not page.is_visible("#sign-in")
    assert page.text_content("#model") == "tiny-random"
    assert [row[0] for row in table(page, "tiers")] == ["device", "host", "disk"]
    (_, prompt_tokens, cached, hit_rate, saved), _ = table(page, "saved")
    assert int(cached.replace(",", "")) > 500 and int(prompt_tokens.replace(",", "")) > 1500
    assert hit_rate.endswith(" %") and saved != "0 ms"
    assert {row[0]: row[1] for row in table(page, "ttft")} == {"cold": "2", "device": "1"}
    tenants = {row[0]: row[1:] for row in table(page, "tenants")}
    assert tenants.keys() == {"alice", HOSTILE}, "names are shown as text"
    assert tenants["alice"][:2] == ["25.0 %", "2"]
    assert tenants["alice"][4].endswith("iB") and tenants["alice"][4] != "0 B"
    assert page.query_selector("img") is None
    assert [row[2:4] for row in largest] == [["tiny-random", "24h"]] * 2
    tokens = [int(row[4].replace(",", "")) for row in largest]
    assert len(tokens) == 2 and tokens[0] > tokens[1]


def test_lines_can_be_told_apart_without_colours(page: Any) -> None:
    sign_in(page)
    table(page, "largest")
    for name, num_lines in (("hits", 3), ("ttft-chart", 4), ("moves", 4)):
        dashes = page.eval_on_selector_all(
            f"#{name} > svg .series", "lines => lines.map(l => getComputedStyle(l).strokeDasharray)"
        )
        assert len(set(dashes)) == len(dashes) == num_lines
        assert len(page.query_selector_all(f"#{name} figcaption span")) == num_lines
    drawn = page.eval_on_selector_all(
        "#hits > svg .series", "lines => lines.map(l => l.getBBox().width)"
    )
    assert max(drawn) > 100


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_the_width_of_a_phone(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    sign_in(page)
    table(page, "largest")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.eval_on_selector_all(
        "section", "all => all.filter(s => s.scrollWidth > s.clientWidth).map(s => s.innerText)"
    )
    assert cut == []


def test_a_prefix_is_evicted_once_that_is_confirmed(page: Any, server: Server) -> None:
    asked = list[str]()
    sign_in(page)
    before = table(page, "largest")
    num_blocks = server.df()["disk"]["blocks"]

    def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.dismiss() if len(asked) == 1 else dialog.accept()

    page.on("dialog", answer)
    page.click("#largest tbody tr:last-child button")
    num_evicted = int(before[-1][4].replace(",", "")) // 16
    assert asked[0].startswith(f"Evict the prefix {before[-1][0]} ({num_evicted} blocks, ")
    assert server.df()["disk"]["blocks"] == num_blocks, "evicted although that was not confirmed"
    page.click("#largest tbody tr:last-child button")
    wait_until(lambda: page.text_content("#status").startswith("Evicted "), "an eviction")
    assert [row[0] for row in table(page, "largest")] == [row[0] for row in before[:-1]]
    assert server.df()["disk"]["blocks"] == num_blocks - num_evicted


def test_the_key_is_forgotten_on_demand_and_by_reloading(page: Any) -> None:
    for forget in (lambda: page.click("#sign-out"), page.reload):
        sign_in(page)
        table(page, "largest")
        forget()
        assert page.is_visible("#sign-in") and not page.is_visible("#figures")
        assert page.query_selector_all("tbody tr") == []


def test_no_other_page_may_frame_it_and_no_script_may_be_put_into_it(
    page: Any, browser: Any, server: Server
) -> None:
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p>x</p>')")
    framing = browser.new_page()
    body = '<iframe src="/ui"></iframe><iframe src="/version"></iframe>'
    framing.route("**/framing", lambda it: it.fulfill(content_type="text/html", body=body))
    framing.goto(f"{server.root}/framing")  # returns once its frames are loaded
    _, refused, shown = framing.frames
    assert "version" in shown.text_content("body")
    assert refused.query_selector("#sign-in") is None
    framing.close()
