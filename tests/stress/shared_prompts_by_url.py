"""Measures how soon any server finds a short prompt that many requests share.

\b
    python -m tests.stress.shared_prompts_by_url --url http://localhost:8000 --server 'vLLM 0.33'

The server must already run; it may be tieredkv, vLLM or another one. The prompts of a group begin
with the same `--shared-tokens` random token ids and go on with `--own-tokens` further ones each.
They are sent one at a time and ask for one token. The first one of a group finds nothing: its time
is what computing takes. The second one may show a server where prompts part. What the others find
counts: `found` is the share of the shared tokens, floored to a multiple of 64, that `cached_tokens`
comes to, at most 1 for each prompt, and `ttft_ms` their times beside those of the first ones.
"""

import json
import statistics
from typing import Any

import click

from tests.stress.client import measures_a_server
from tests.stress.ttft_by_url import Server
from tieredkv.bench import raw

GRID = 64

Row = dict[str, Any]


def measure(server: Server, shared_tokens: int, own_tokens: int, requests: int) -> list[Row]:
    """Send the prompts of one group; return what each one found, and its milliseconds."""
    shared = server.new_prompt(shared_tokens)
    rows = list[Row]()
    for _ in range(requests):
        ttft_ms, cached = server.ttft(shared + server.new_prompt(own_tokens))
        rows.append({"ttft_ms": ttft_ms, "cached_tokens": cached})
    return rows


def figures(groups: list[list[Row]], shared_tokens: int) -> Row:
    """Return the figures of some groups: times of the first prompts, and of the third on."""
    whole = shared_tokens // GRID * GRID
    first, later = [group[0] for group in groups], [row for group in groups for row in group[2:]]
    found = [min(1.0, row["cached_tokens"] / whole) for row in later]
    times = {"first": [row["ttft_ms"] for row in first], "later": [row["ttft_ms"] for row in later]}
    return {
        "found": statistics.mean(found),
        "found_second": statistics.mean(min(1.0, it[1]["cached_tokens"] / whole) for it in groups),
        "ttft_ms": {name: {"p50": statistics.median(some)} for name, some in times.items()},
    }


@click.command(help=__doc__)
@measures_a_server
@click.option("--shared-tokens", type=click.IntRange(min=GRID), default=600, show_default=True)
@click.option("--own-tokens", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--requests", type=click.IntRange(min=3), default=8, show_default=True)
@click.option("--groups", type=click.IntRange(min=1), default=10, show_default=True)
def main(
    url: str,
    name: str,
    shared_tokens: int,
    own_tokens: int,
    requests: int,
    groups: int,
    vocab_size: int,
    commit: str | None,
) -> None:
    server = Server(url, vocab_size)
    for _ in range(3):  # steps of these lengths may be compiled
        server.ttft(server.new_prompt(shared_tokens + own_tokens))
    rows = [measure(server, shared_tokens, own_tokens, requests) for _ in range(groups)]
    found = figures(rows, shared_tokens)
    click.echo(
        "{found:.3f} of the shared tokens found, TTFT p50 {ttft_ms[later][p50]:.1f} ms instead of "
        "{ttft_ms[first][p50]:.1f}".format(**found),
        err=True,
    )
    report = raw.head(commit, "python -m tests.stress.shared_prompts_by_url") | {"server": name}
    report |= {"shared_tokens": shared_tokens, "own_tokens": own_tokens, "requests": requests}
    click.echo(json.dumps(report | found | {"groups": rows}))


if __name__ == "__main__":
    main()
