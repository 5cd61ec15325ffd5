"""Takes a picture of the operator's page, as docs/page.png was made.

\b
    python -m tests.stress.page_picture --out docs/page.png

A server of `tiny-random` with small tiers answers generated prompts of three tenants for a while.
Then a headless Chromium opens the page and lists the largest prefixes. It needs playwright.
"""

import asyncio
import random
import tempfile
from pathlib import Path
from time import monotonic

import click
import httpx

from tests.browser import headless, sign_in
from tests.stress.client import serving
from tieredkv.http_clients import async_http_client

OPERATOR = "sk-operator"
CLIENTS = {"support-agents": (2, "24h"), "research": (1, "24h"), "batch": (1, "in_memory")}
"""How many clients each tenant has, and the retention that they ask for."""

KEYS = f"""
[support-agents]
key = "support-agents"
share = 0.25
[research]
key = "research"
share = 0.25
[batch]
key = "batch"
[operator]
key = "{OPERATOR}"
admin = true
"""
SIZES = ("--device-size", "4MiB", "--host-size", "6MiB", "--disk-size", "48MiB")
VOCABULARY = 256
HEAD_TOKENS = 256  # the same for all conversations of a tenant
NUM_CONVERSATIONS = 5  # of a client
MAX_TOKENS = 1200
THINK_S = 2.0
TIMEOUT_S = 120.0

FIRST_ROWS = """number => {
  for (const row of document.querySelectorAll("#slowest tbody tr, #largest tbody tr"))
    if (row.sectionRowIndex >= number) row.remove();
}"""


async def converse(
    http: httpx.AsyncClient, tenant: str, retention: str, seed: int, until: float
) -> None:
    """Continue conversations in turn, each until it is long, and then a new one."""
    chance = random.Random(f"{tenant} {seed}")
    head = random.Random(tenant).choices(range(VOCABULARY), k=HEAD_TOKENS)
    conversations = [[*head] for _ in range(NUM_CONVERSATIONS)]
    headers = {"Authorization": f"Bearer {tenant}"}
    while monotonic() < until:
        prompt = chance.choice(conversations)
        prompt += chance.choices(range(VOCABULARY), k=chance.randrange(32, 160))
        body = {"model": "tiny-random", "prompt": prompt, "max_tokens": 4}
        body["prompt_cache_retention"] = retention
        (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status()
        if len(prompt) > MAX_TOKENS:
            prompt[:] = head
        await asyncio.sleep(chance.expovariate(1 / THINK_S))


async def use(url: str, until: float) -> None:
    """Have all clients converse until a moment."""
    async with async_http_client(url, timeout=TIMEOUT_S) as http:
        clients = [
            converse(http, tenant, retention, seed, until)
            for tenant, (num_clients, retention) in CLIENTS.items()
            for seed in range(num_clients)
        ]
        await asyncio.gather(*clients)


@click.command(help=__doc__)
@click.option("--minutes", default=24.0, show_default=True, help="How long the server is used.")
@click.option("--width", default=1000, show_default=True, help="Of the browser, in pixels.")
@click.option("--rows", default=6, show_default=True, help="Of each list, at most.")
@click.option("--dark", is_flag=True, help="Ask for dark colours.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(minutes: float, width: int, rows: int, dark: bool, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.touch(mode=0o600)
        keys.write_text(KEYS)
        flags = ("--api-keys-file", str(keys), "--disk-dir", str(Path(folder, "store")), *SIZES)
        with serving("tiny-random", *flags) as url:
            asyncio.run(use(url, monotonic() + 60 * minutes))
            with headless() as browser:
                scheme = "dark" if dark else "light"
                size = {"width": width, "height": 900}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(f"{url}/ui")
                sign_in(page, OPERATOR)
                page.click("#list")
                page.wait_for_selector("#largest tbody tr")
                page.evaluate(FIRST_ROWS, rows)
                page.screenshot(path=out, full_page=True)


if __name__ == "__main__":
    main()
