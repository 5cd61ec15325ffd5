"""Runs a server in a process of its own, and sends requests over plain sockets at little cost."""

import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import click
import httpx

from tieredkv.cli.bench_options import with_options
from tieredkv.http_clients import http_client

Prompt = list[int]
measures_a_server = with_options(
    [
        click.option("--url", required=True, help="URL of the server, without `/v1`."),
        click.option(
            "--server", "name", required=True, help="Server, version and flags, for the report."
        ),
        click.option(
            "--vocab-size", default=128_000, show_default=True, help="Token ids are below it."
        ),
        click.option("--commit", help="Commit to report, if the source tree has no git history."),
    ]
)
"""Adds the options of a command that measures a running server."""

NUM_TOPS = 5  # likeliest tokens of each place, of which a server is asked to tell


def prompts_of(num: int, length: int, vocab_size: int, seed: object) -> list[Prompt]:
    """Return `num` random prompts of `length` tokens each."""
    generator = random.Random(str(seed))
    return [generator.choices(range(vocab_size), k=length) for _ in range(num)]


@contextlib.contextmanager
def serving(model: str, *flags: str) -> Iterator[str]:
    """Run `tieredkv serve`; yield its URL."""
    words = [sys.executable, "-P", "-m", "tieredkv", "serve", model, "--port", "0", "--json"]
    process = subprocess.Popen([*words, *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.communicate()


def served_by(url: str, key: str = "") -> str:
    """Return the name of the model that a server serves."""
    headers = {"x-api-key": key} if key else {}
    with http_client(url, headers=headers) as http:
        name: str = http.get("/v1/models").json()["data"][0]["id"]
    return name


def request_of(url: str, model: str, prompt: Prompt, num_tokens: int, key: str = "") -> bytes:
    """Return the bytes of an HTTP request for a streamed completion."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": num_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = [f"POST /v1/completions HTTP/1.1\r\nHost: {url}", f"Content-Length: {len(data)}"]
    head += [f"x-api-key: {key}"] if key else []
    return "\r\n".join([*head, "\r\n"]).encode() + data


async def stream_one(url: str, requests: Iterable[bytes]) -> list[float]:
    """Send requests one after the other; return the seconds to the first event of each."""
    at, firsts = httpx.URL(url), list[float]()
    reader, writer = await asyncio.open_connection(at.host, at.port)
    with contextlib.closing(writer):
        for request in requests:
            start = perf_counter()
            writer.write(request)
            while not (line := await reader.readline()).startswith(b"data: {"):
                assert line, "the server has closed the connection"
            firsts.append(perf_counter() - start)
            while (line := await reader.readline()) != b"0\r\n":  # the last chunk
                assert line and b'"error"' not in line, line
            await reader.readline()
    return firsts


def difference(
    tokens: Sequence[str], tops: Sequence[Mapping[str, float]], others: Sequence[str], tie: float
) -> tuple[str, int]:
    """Return whether two answers are `equal`, part at a `tie`, or one is `wrong`, and where.

    Args:
        tokens: of the answer that is right.
        tops: the log-probabilities of the likeliest tokens in the place of each.
        others: tokens of the other answer.
        tie: by how much less likely a token may be than the right one.
    """
    for place, (one, two) in enumerate(zip(tokens, others, strict=True)):
        if one != two:
            return ("tie" if gap(tops[place], two) < tie else "wrong"), place
    return "equal", 0


def gap(top: Mapping[str, float], token: str) -> float:
    """By how much a token is less likely than the likeliest one; infinite if it is not listed."""
    return max(top.values()) - top.get(token, -math.inf)
