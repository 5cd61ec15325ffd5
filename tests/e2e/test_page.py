"""The operator's page in a real browser, on a real server; needs playwright and a Chromium.

`make test-full` installs playwright. The browser is playwright's own or one of the system.
"""

import contextlib
import functools
import json
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import http
from tests.browser import headless, sign_in
from tests.serving import Server, running
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPERATOR = "operator-kéy"
AUTHORIZATION = {b"Authorization": f"Bearer {OPERATOR}".encode()}
HOSTILE = "<img src=x onerror=alert(1)>"
KEYS = f"""
[alice]
key = "alice-key"
share = 0.25

["{HOSTILE}"]
key = "hostile-key"
"""
SECOND_OPERATOR = '[bob]\nkey = "bobs-key"\nadmin = true\n'
NO_VALUE = "\N{EN DASH}"
RESULT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        try:
            browser = stack.enter_context(headless())
        except (ModuleNotFoundError, FileNotFoundError) as error:
            pytest.skip(str(error))
        yield browser


def complete(server: Server, key: str, num_words: int, **fields: Any) -> None:
    body = {"model": "tiny-random", "prompt": f"{key} speaks " * num_words, "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    answer = http.post(f"{server.url}/completions", json=body | fields, headers=headers)
    assert answer.status_code == 200, answer.text


def ask(server: Server, verb: str, **body: Any) -> dict[str, Any]:
    answer = http.post(f"{server.root}/admin/cache/{verb}", json=body, headers=AUTHORIZATION)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def fill(server: Server) -> None:
    """Have two tenants ask for something; the disk keeps what the first one asked for."""
    complete(server, "alice-key", 60)
    complete(server, "alice-key", 60)
    complete(server, "hostile-key", 30, prompt_cache_retention="in_memory")


@pytest.fixture(scope="module")
def other_origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another web server, whose pages may use the API."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path_factory.mktemp("web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, other_origin: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    keys = folder / "keys.toml"
    keys.write_text(KEYS + SECOND_OPERATOR)
    keys.chmod(0o600)
    flags = ("--api-keys-file", str(keys), "--admin-key", OPERATOR, "--disk-write", "write_behind")
    with running(folder, *flags, "--cors-origin", other_origin) as server:
        fill(server)

        def is_on_disk() -> bool:
            [chain] = ask(server, "ls", filter="retention=24h")["chains"]
            return bool(chain["blocks_by_tier"]["disk"] == chain["blocks"])

        wait_until(is_on_disk, "blocks on disk")
        yield server


@contextlib.contextmanager
def opened(browser: Any, server: Server) -> Iterator[Any]:
    """Open the page, which may raise no error, ask no other server, and leave the key nowhere.

    The page has another attribute: `asked`, its requests so far.
    """
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    page = context.new_page()
    problems, requests = list[str](), list[Any]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda it: problems.append(it.text) if it.type == "error" else None)
    page.on("request", lambda request: requests.append(request))
    page.goto(f"{server.root}/ui")
    page.asked = requests
    yield page
    assert [text for text in problems if not text.startswith("Failed to load resource")] == []
    for request in requests:
        assert request.url.startswith(f"{server.root}/")
        headers = request.all_headers()
        assert "cookie" not in headers and not headers.get("referer")
        assert ("authorization" in headers) == ("/admin/" in request.url)
        if response := request.response():
            assert "set-cookie" not in response.all_headers()
    assert {"/ui", "/ui/page.css", "/ui/page.js"} <= {path_of(request) for request in requests}
    assert not any("key" in it.url or "k%C3" in it.url or "?" in it.url for it in requests)
    assert context.cookies() == []
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
    assert page.url == f"{server.root}/ui"
    context.close()


def path_of(request: Any) -> str:
    return "/" + str(request.url).split("/", 3)[3]


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, before the key is given."""
    with opened(browser, server) as page:
        yield page


def table(page: Any, name: str) -> list[list[str]]:
    """Return the texts of the cells of a table's rows, once it has any."""
    page.wait_for_selector(f"#{name} tbody tr", timeout=RESULT_MS)
    rows: list[list[str]] = page.eval_on_selector_all(
        f"#{name} tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    return rows


def asked(page: Any, path: str) -> list[Any]:
    """Return the answers to the page's requests for this path, once there are figures."""
    page.wait_for_selector("#saved tbody tr", timeout=RESULT_MS)
    return [each.response() for each in page.asked if path_of(each) == path]


def largest(page: Any) -> list[list[str]]:
    """Have the page list the largest prefixes; return the table."""
    page.click("#list")
    return table(page, "largest")


def test_nothing_is_shown_without_the_key(page: Any) -> None:
    sign_in(page, "wrong")
    wait_until(lambda: page.text_content("#status") == "Incorrect API key provided.", "a refusal")
    assert not page.is_visible("#figures")
    assert page.input_value("#key") == ""


def test_it_shows_tiers_savings_times_and_tenants(page: Any) -> None:
    sign_in(page, OPERATOR)
    (_, prompt_tokens, cached, hit_rate, saved), _ = table(page, "saved")
    assert not page.is_visible("#sign-in")
    assert page.text_content("#model") == "tiny-random"
    assert [row[0] for row in table(page, "tiers")] == ["device", "host", "disk"]
    assert int(cached.replace(",", "")) > 500 and int(prompt_tokens.replace(",", "")) > 1500
    assert hit_rate.endswith(" %") and saved != "0 ms"
    assert {row[0]: row[1] for row in table(page, "ttft")} == {"cold": "2", "device": "1"}
    tenants = {row[0]: row[1:] for row in table(page, "tenants")}
    assert tenants.keys() == {"alice", HOSTILE}, "names are shown as text"
    assert tenants["alice"][:2] == ["25.0 %", "2"]
    assert tenants["alice"][4].endswith("iB") and tenants["alice"][4] != "0 B"
    assert page.query_selector("img") is None


def test_it_shows_the_slowest_requests_with_their_receipts(page: Any) -> None:
    sign_in(page, OPERATOR)
    [history] = asked(page, "/admin/history")
    told = history.json()["slowest"]
    rows = table(page, "slowest")
    assert len(rows) == len(told) == 3
    assert sorted(row[1] for row in rows) == sorted([HOSTILE, "alice", "alice"])
    assert page.query_selector("img") is None, "names are shown as text"
    for row, each in zip(rows, told, strict=True):
        ttft_s, queue_s, prefill_s = (each[it] for it in ("ttft_s", "queue_s", "prefill_s"))
        assert all(it.endswith("s") for it in row[2:6])
        assert ttft_s >= queue_s + prefill_s and prefill_s > 0
        assert row[6] == f"{each['prompt_tokens']:,}"
        cached = each["cached_tokens"].get("device", 0)
        computed = f"computed {each['prompt_tokens'] - cached:,}"
        assert row[7] == (f"device {cached:,}, {computed}" if cached else computed)
        assert row[8] == (NO_VALUE if cached else "not stored before")


def test_the_largest_prefixes_of_all_tiers_are_listed_on_demand_only(page: Any) -> None:
    sign_in(page, OPERATOR)
    assert asked(page, "/admin/history") and not page.is_visible("#largest")
    page.click("#sign-out")
    sign_in(page, OPERATOR)
    assert asked(page, "/admin/cache/ls") == []
    first, second = largest(page)
    assert len(asked(page, "/admin/cache/ls")) == 1
    assert page.text_content("#listed").startswith("The 2 largest at ")
    assert first[1:4] == ["alice", "tiny-random", "24h"]
    assert second[1:4] == [HOSTILE, "tiny-random", "in_memory"]
    assert page.query_selector("img") is None, "names are shown as text"
    assert first[4].startswith("device") and first[4].endswith("disk")
    assert second[4].startswith("device") and "disk" not in second[4]
    assert int(first[5].replace(",", "")) > int(second[5].replace(",", ""))


def test_lines_can_be_told_apart_without_colours(page: Any) -> None:
    sign_in(page, OPERATOR)
    table(page, "saved")
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
    full = page.eval_on_selector_all("#tiers span", "all => all.map(each => each.innerText)")
    assert len(full) == 3 and all(text.endswith(" %") for text in full), "figures beside the bars"


COLOURS = """() => {
  const back = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? back(e.parentElement) : colour;
  };
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility());
  const used = (e, name) => [e.outerHTML.slice(0, 80), getComputedStyle(e)[name], back(e)];
  return {
    text: shown.filter((e) => !e.closest("svg") && hasText(e)).map((e) => used(e, "color")),
    label: shown.filter((e) => e.matches("svg text")).map((e) => used(e, "fill")),
    line: shown.filter((e) => e.matches("svg .series")).map((e) => used(e, "stroke")),
  };
}"""
LEAST_CONTRAST = {"text": 4.5, "label": 4.5, "line": 3.0}
"""Of the Web Content Accessibility Guidelines 2.2, level AA."""


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
    return sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrasts_suffice_in_both_colour_schemes(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    sign_in(page, OPERATOR)
    largest(page)
    is_dark = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.2
    assert is_dark == (scheme == "dark")
    for kind, used in page.evaluate(COLOURS).items():
        assert len(used) > 10
        for what, *colours in used:
            lower, higher = sorted(map(luminance, colours))
            assert (higher + 0.05) / (lower + 0.05) >= LEAST_CONTRAST[kind], (what, colours)


def forwarded(request: Any) -> str:
    """Return the body that the server answers to a request of the page."""
    body, url = request.post_data, request.url
    return http.request(request.method, url, content=body, headers=AUTHORIZATION).text


def rename(route: Any) -> None:
    """Answer as the server does, with long names."""
    text = forwarded(route.request)
    text = text.replace('"alice"', f'"{"a" * 100}"').replace("tiny-random", "models/" * 20)
    route.fulfill(body=text)


def test_what_is_unknown_or_in_parts_is_told_as_text(page: Any) -> None:
    def change(route: Any) -> None:
        told = json.loads(forwarded(route.request))
        for each in told.get("slowest", ()):
            each["miss_reason"] = HOSTILE
        for each in told.get("chains", ()):
            each |= {"namespace": "0123456789abcdef" * 4, "model": HOSTILE, "tokens": None}
            each["blocks_by_tier"] = {"device": 0, "host": 1, "disk": each["blocks"]}
        route.fulfill(json=told)

    page.route("**/admin/**", change)
    sign_in(page, OPERATOR)
    assert {row[8] for row in table(page, "slowest")} == {HOSTILE}
    for row in largest(page):
        assert row[1:3] + row[5:6] == ["namespace 0123456789ab", HOSTILE, NO_VALUE]
        assert row[4].startswith("host 1 of ") and row[4].endswith(", disk")
    assert page.query_selector("img") is None


@pytest.mark.parametrize("width", [360, 768, 1000, 1280])
def test_it_fits_the_width_of_a_phone(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    page.route("**/admin/**", rename)
    sign_in(page, OPERATOR)
    table(page, "slowest")
    largest(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.eval_on_selector_all(
        "section", "all => all.filter(s => s.scrollWidth > s.clientWidth).map(s => s.innerText)"
    )
    assert cut == []
    sizes = page.eval_on_selector_all(
        "th, td, p, figcaption, svg text",
        "all => all.map(e => parseFloat(getComputedStyle(e).fontSize))",
    )
    assert min(sizes) >= 12


def press_tab_until(page: Any, selector: str, key: str = "Tab") -> None:
    """Move the focus to an element with the keyboard; on its way it must be visible."""
    for _ in range(30):
        page.keyboard.press(key)
        if page.evaluate("name => document.activeElement.matches(name)", selector):
            outline = page.evaluate("getComputedStyle(document.activeElement).outline")
            assert "solid" in outline and "3px" in outline
            return
    raise AssertionError(f"the keyboard does not reach {selector}")


def test_it_works_with_the_keyboard_alone(page: Any) -> None:
    dialogs = list[str]()

    def dismiss(dialog: Any) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type(OPERATOR)
    page.keyboard.press("Enter")
    table(page, "saved")
    press_tab_until(page, "#list")
    page.keyboard.press("Enter")
    table(page, "largest")
    press_tab_until(page, "#largest tbody tr:last-child button", "Shift+Tab")
    page.keyboard.press("Enter")
    assert len(dialogs) == 1 and dialogs[0].startswith("Evict the prefix ")
    press_tab_until(page, "#sign-out", "Shift+Tab")
    page.keyboard.press("Enter")
    assert page.is_visible("#sign-in")
    assert page.evaluate("document.activeElement.id") == "key"


def test_the_key_is_forgotten_on_demand_by_reloading_and_by_leaving(page: Any) -> None:
    def leave() -> None:  # as where a browser keeps the page for its button to go back
        page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', {persisted: true}))")

    sums = list[list[str]]()
    for forget in (lambda: page.click("#sign-out"), page.reload, leave):
        sign_in(page, OPERATOR)
        sums.append(table(page, "saved")[0][1:4])
        largest(page)
        forget()
        assert page.is_visible("#sign-in") and not page.is_visible("#figures")
        assert page.input_value("#key") == ""
        assert page.query_selector_all("tbody tr, figure svg") == []
        assert not page.text_content("#listed")
    assert sums[0] == sums[1] == sums[2] and sums[0][0] != "0", "the server keeps the history"


def test_a_key_that_is_no_longer_an_operators_ends_the_page(page: Any, server: Server) -> None:
    keys = server.disk_dir.with_name("keys.toml")
    sign_in(page, "bobs-key")
    before = table(page, "saved")[0][1:4]
    keys.write_text(KEYS)
    server.process.send_signal(signal.SIGHUP)
    headers = {"Authorization": "Bearer bobs-key"}
    url = f"{server.root}/admin/history"
    wait_until(lambda: http.get(url, headers=headers).status_code == 401, "the key is still known")
    page.click("#list")
    wait_until(lambda: page.text_content("#status") == "Incorrect API key provided.", "a refusal")
    assert page.is_visible("#sign-in") and not page.is_visible("#figures")
    assert page.query_selector_all("tbody tr, figure svg") == []
    sign_in(page, OPERATOR)
    assert table(page, "saved")[0][1:4] == before, "other keys leave the history as it was"


def test_a_server_that_has_gone_is_told_and_asked_again(page: Any, server: Server) -> None:
    page.clock.install()
    sign_in(page, OPERATOR)
    table(page, "saved")
    page.route("**/admin/**", lambda route: route.abort())
    page.clock.run_for(60_000)
    wait_until(lambda: page.text_content("#status") == "The server does not answer.", "no word")
    page.unroute_all()
    page.route("**/admin/**", lambda it: it.fulfill(status=502, body="<h1>Bad gateway</h1>"))
    page.clock.run_for(60_000)
    wait_until(lambda: page.text_content("#status") == "The server answered 502.", "no word")
    page.unroute_all()
    page.clock.run_for(60_000)
    wait_until(lambda: page.text_content("#status").startswith("Updated at "), "not asked again")
    assert page.is_visible("#saved")


FETCH = """async ([url, options]) => {
  try {
    const answer = await fetch(url, options);
    return answer.type === "opaque" ? "loaded" : answer.status;
  } catch {
    return "refused";
  }
}"""


def test_no_page_may_frame_it_and_nothing_put_into_it_can_send_the_key_away(
    browser: Any, server: Server, other_origin: str
) -> None:
    page, framing = browser.new_page(), browser.new_page()
    page.goto(f"{server.root}/ui")
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p>x</p>')")
    assert page.evaluate(FETCH, [other_origin, {"mode": "no-cors"}]) == "refused"
    body = '<iframe src="/ui"></iframe><iframe src="/version"></iframe>'
    framing.route("**/framing", lambda it: it.fulfill(content_type="text/html", body=body))
    framing.goto(f"{server.root}/framing")  # returns once its frames are loaded
    _, refused, shown = framing.frames
    assert "version" in shown.text_content("body")
    assert refused.query_selector("#sign-in") is None
    page.close()
    framing.close()


def test_a_page_that_may_use_the_api_reads_nothing_of_this_one(
    browser: Any, server: Server, other_origin: str
) -> None:
    other = browser.new_page()
    other.goto(other_origin)

    def fetched(path: str, key: str = "", **options: Any) -> Any:
        # Browsers send characters of a header as Latin-1.
        headers = {"Authorization": f"Bearer {key.encode().decode('latin-1')}"} if key else {}
        return other.evaluate(FETCH, [server.root + path, {"headers": headers, **options}])

    assert fetched("/v1/models", "alice-key") == 200
    assert fetched("/version", mode="no-cors") == "loaded"
    for path in ("/ui", "/ui/page.js"):
        assert fetched(path) == fetched(path, mode="no-cors") == "refused"
    assert fetched("/admin/history", OPERATOR) == "refused"
    assert fetched("/admin/cache/df", OPERATOR, method="POST", body="{}") == "refused"
    evict = {"method": "POST", "body": '{"all": true}'}
    assert fetched("/admin/cache/evict", OPERATOR, **evict) == "refused"
    assert fetched("/admin/cache/evict", mode="no-cors", **evict) == "loaded", "which is a 401"
    assert len(ask(server, "ls")["chains"]) == 2, "nothing was evicted"
    other.close()


def test_a_prefix_is_evicted_from_every_tier_once_that_is_confirmed(
    page: Any, server: Server
) -> None:
    dialogs = list[str]()
    sign_in(page, OPERATOR)
    first, second = largest(page)

    def answer(dialog: Any) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss() if len(dialogs) == 1 else dialog.accept()

    page.on("dialog", answer)
    page.click("#largest tbody tr:first-child button")
    num_blocks = int(first[5].replace(",", "")) // 16
    assert dialogs[0].startswith(f"Evict the prefix {first[0]} ({num_blocks} blocks, ")
    chains = {each["id"][:12]: each for each in ask(server, "ls")["chains"]}
    assert len(chains) == 2, "evicted although that was not confirmed"
    copies = chains[first[0]]["blocks_by_tier"]
    assert copies["disk"] == num_blocks
    page.click("#largest tbody tr:first-child button")
    in_memory = copies["device"] + copies["host"]
    told = f"Evicted {in_memory} copies of blocks from memory and {num_blocks} from disk, "
    wait_until(lambda: page.text_content("#status").startswith(told), "an eviction")
    assert [row[0] for row in table(page, "largest")] == [second[0]]
    assert page.evaluate("document.activeElement.id") == "list"
    assert [each["retention"] for each in ask(server, "ls")["chains"]] == ["in_memory"]
    page.click("#largest tbody tr:first-child button")
    wait_until(lambda: page.text_content("#listed") == "No tier holds any prefix.", "an eviction")
    assert not page.is_visible("#largest")
    tiers = ask(server, "df")
    assert [tiers[tier]["blocks"] for tier in ("device", "host", "disk")] == [0, 0, 0]


def test_it_needs_no_disk(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    flags = ("--api-keys-file", str(keys), "--admin-key", OPERATOR)
    with running(tmp_path, *flags, has_disk=False) as server, opened(browser, server) as page:
        fill(server)
        sign_in(page, OPERATOR)
        assert [row[0] for row in table(page, "tiers")] == ["device", "host"]
        assert {row[5] for row in table(page, "tenants")} == {NO_VALUE}
        assert [row[1] for row in largest(page)] == ["alice", HOSTILE]
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("#largest tbody tr:first-child button")
        told = " blocks from memory and 0 from disk, "
        wait_until(lambda: told in page.text_content("#status"), "an eviction")
        assert [row[1] for row in table(page, "largest")] == [HOSTILE]
        [left] = ask(server, "ls")["chains"]
        assert left["retention"] == "in_memory"
        assert ask(server, "df")["disk"] is None


@pytest.mark.usefixtures("browser")
def test_its_picture_in_the_docs_can_be_taken_again(tmp_path: Path) -> None:
    out = tmp_path / "page.png"
    words = ("-m", "tests.stress.page_picture", "--minutes", "0.02", "--out", str(out))
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    head = out.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    assert width == 1000 and height > 1500, "with all figures"
