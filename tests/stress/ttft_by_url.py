"""Measures the time to the first token, by tier, of any server with OpenAI's completions API.

\b
    python -m tests.stress.ttft_by_url --url http://localhost:8000 --prefix-tokens 8192,32768

The server must already run; it may be tieredkv, vLLM or another one. A prompt is a prefix of random
token ids and 64 further ids. One request is sent at a time, and it asks for one token. The arms are
measured in this order for each length of a prefix:

\b
    cold    the prefix was never sent before
    device  the prefix was sent a moment ago
    host    the prefix was sent, and after it other prompts of `--flood-tokens` ids in all, which
            must be more than VRAM holds and fewer than host memory holds

`cached_tokens` is what the server reports in the `usage` of the measured request. If a request that
should have been a hit was a miss, it is listed in `problems` and the exit code is 1.
"""

import itertools
import json
import statistics
import sys
from time import perf_counter
from typing import Any

import click

from tests.stress.client import Prompt, measures_a_server, prompts_of, served_by
from tieredkv.bench import raw
from tieredkv.http_clients import http_client

SUFFIX_TOKENS = 64
ARMS = ("cold", "device", "host")


class Server:
    """A running server, asked for one token at a time over one connection."""

    def __init__(self, url: str, vocab_size: int) -> None:
        self._client = http_client(url, timeout=300.0)
        self._model = served_by(url)
        self._vocab_size = vocab_size
        self._seeds = itertools.count()

    def new_prompt(self, length: int) -> Prompt:
        """Return random token ids that no earlier prompt begins with."""
        [prompt] = prompts_of(1, length, self._vocab_size, ("ttft", next(self._seeds)))
        return prompt

    def ttft(self, prompt: Prompt) -> tuple[float, int]:
        """Return the milliseconds to the first token and how many prompt tokens were cached."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        start, first_ms, cached = perf_counter(), 0.0, 0
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_ms = first_ms or 1e3 * (perf_counter() - start)
                usage = json.loads(line[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached
        return first_ms, cached

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def flood(self, num_tokens: int, length: int) -> None:
        """Send prompts of so many tokens in all, so that older prefixes leave VRAM."""
        for _ in range(0, num_tokens, length):
            self.ttft(self.new_prompt(length))


def measure(server: Server, arm: str, length: int, flood_tokens: int) -> tuple[float, int]:
    """Measure one request of an arm with a new prefix."""
    prefix = server.new_prompt(length)
    if arm != "cold":
        server.ttft(prefix)
    if arm == "host":
        server.flood(flood_tokens, length)
    return server.ttft(prefix + server.new_prompt(SUFFIX_TOKENS))


@click.command(help=__doc__)
@measures_a_server
@click.option(
    "--prefix-tokens", default="2048,8192,32768", show_default=True, help="Lengths of the prefix."
)
@click.option("--arms", default=",".join(ARMS), show_default=True, help="Arms to measure.")
@click.option(
    "--flood-tokens", default=262_144, show_default=True, help="Tokens sent before a `host` hit."
)
@click.option("--repeats", default=5, show_default=True, help="Requests per arm and length.")
def main(
    url: str,
    name: str,
    prefix_tokens: str,
    arms: str,
    flood_tokens: int,
    vocab_size: int,
    repeats: int,
    commit: str | None,
) -> None:
    server, rows, problems = Server(url, vocab_size), list[dict[str, Any]](), list[str]()
    for length in map(int, prefix_tokens.split(",")):
        server.ttft(server.new_prompt(length))  # the first of its length may compile kernels
        for arm in arms.split(","):
            all_ms, cached = zip(
                *(measure(server, arm, length, flood_tokens) for _ in range(repeats)), strict=True
            )
            p50_ms = statistics.median(all_ms)
            ttft_ms = {"p50": p50_ms, "min": min(all_ms), "all": list(all_ms)}
            rows.append({"arm": arm, "prefix_tokens": length, "ttft_ms": ttft_ms})
            rows[-1]["cached_tokens"] = list(cached)
            click.echo(f"{arm:>7} {length:>7}  p50 {p50_ms:8.1f} ms  cached {cached}")
            if arm != "cold" and min(cached) < length // 2:
                problems.append(f"{arm} {length}: only {min(cached)} tokens were cached")
    report = raw.head(commit, "python -m tests.stress.ttft_by_url") | {"server": name}
    click.echo(json.dumps(report | {"rows": rows, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
