"""Lets agents take turns on any server with OpenAI's API, as clients see it.

\b
    python -m tests.stress.sessions_by_url --url http://localhost:8000 --server 'tieredkv, 24 GiB'

The server must already run; it may be tieredkv, vLLM or another one. The sessions are those of
`tieredkv bench sessions`, sent as token ids over HTTP: each waits for its answer, thinks, and sends
a longer prompt. A run ends when the first session does, or with `--until last` when all have ended,
and each further run has sessions of another seed. What a run leaves in the server's cache is of no
use to the next one, but is still there, so that figures of an empty cache need a new server.

With `--chat` they are conversations instead. Their messages, of 1,000 letters each, are in turn the
user's and the model's, and the last one asks to go on. The server's `/tokenize` says what prompts
they make.

`cached_tokens` is what the server reports. `unbounded_hit_rate` is what a cache would find that
keeps all tokens of all prompts for ever, if the sessions took their turns one by one. A hit is an
answer with some cached tokens and with fewer than 2,048 other tokens in its prompt. A request that
fails ends its run; it is listed in `problems`, and the exit code is 1.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import click
import httpx
import numpy as np

from tests.stress.client import served_by
from tieredkv.bench import crowd, crowd_figures, raw
from tieredkv.bench.sessions import MAX_PROMPT_TOKENS, Script, Shape, make_scripts
from tieredkv.cli.bench_options import SESSIONS, with_options
from tieredkv.http_clients import async_http_client, http_client

ANSWER_TIMEOUT_S = 300.0
MESSAGE_LETTERS = 1000

Row = dict[str, Any]


class Answer(NamedTuple):
    """One answer: when its tokens came, in seconds after it was asked for, and its usage.

    Attributes:
        receipt: where the tokens of the prompt came from, if the server is tieredkv.
        repeated_tokens: how many of the prompt's first tokens an earlier prompt began with.
    """

    times_s: list[float]
    prompt_tokens: int
    cached_tokens: int
    receipt: Row
    repeated_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return 1e3 * self.times_s[0]

    @property
    def gaps_ms(self) -> list[float]:
        gaps_ms: list[float] = (1e3 * np.diff(self.times_s)).tolist()
        return gaps_ms

    @property
    def is_hit(self) -> bool:
        return self.cached_tokens > 0 and self.prompt_tokens - self.cached_tokens < crowd.HIT_TOKENS


async def ask(http: httpx.AsyncClient, body: bytes, path: str = "/v1/completions") -> Answer:
    """Send a request for a streamed completion, and read its answer to the end.

    Raises:
        httpx.HTTPError: the server refused the request or broke off.
    """
    start, times_s, usage = perf_counter(), list[float](), dict[str, Any]()
    headers = {"Content-Type": "application/json"}
    async with http.stream("POST", path, content=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise httpx.RemoteProtocolError(str(event["error"]))
            usage = event.get("usage") or usage
            choices = event.get("choices")
            if choices and choices[0].get("delta", {"content": True}).get("content"):
                times_s.append(perf_counter() - start)
    if not times_s:
        raise httpx.RemoteProtocolError("the answer had no tokens")
    details = usage.get("prompt_tokens_details") or {}
    cached, receipt = details.get("cached_tokens") or 0, usage.get("tieredkv") or {}
    return Answer(times_s, usage["prompt_tokens"], cached, receipt)


async def run(
    url: str, model: str, scripts: list[Script], until: str = "first", *, is_chat: bool = False
) -> tuple[list[Answer], float, str]:
    """Run sessions until the `first` or the `last` one has ended, or until a request fails.

    Returns:
        The answers, the seconds from the start to the last one, and what failed.
    """
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    make = chat_body if is_chat else body_of
    bodies = [[make(model, turn.prompt, turn.answer_tokens) for turn in it] for it in scripts]
    prompts: list[list[Sequence[int]]] = [[turn.prompt for turn in script] for script in scripts]
    if is_chat:
        prompts = [tokens_of(url, it) for it in bodies]
    repeated, answers = repeated_tokens(prompts), list[Answer]()
    start, took_s = perf_counter(), 0.0

    async def hold(session: int) -> None:
        nonlocal took_s
        turns = zip(scripts[session], bodies[session], repeated[session], strict=True)
        for turn, body, count in turns:
            await asyncio.sleep(turn.think_s)
            answers.append((await ask(http, body, path))._replace(repeated_tokens=count))
            took_s = perf_counter() - start

    options: Row = {"timeout": ANSWER_TIMEOUT_S, "limits": httpx.Limits(max_connections=None)}
    async with async_http_client(url, **options) as http:
        tasks = [asyncio.create_task(hold(session)) for session in range(len(scripts))]
        when = asyncio.FIRST_COMPLETED if until == "first" else asyncio.FIRST_EXCEPTION
        done, others = await asyncio.wait(tasks, return_when=when)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    for error in filter(None, [task.exception() for task in done]):
        if not isinstance(error, httpx.HTTPError):
            raise error
        return answers, took_s, f"{type(error).__name__}: {error}"
    return answers, took_s, ""


def repeated_tokens(sessions: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return how many tokens each prompt shares with the start of an earlier one.

    The sessions take turns one by one. At least the last token of a prompt is left.
    """
    repeated, sent = [list[int]() for _ in sessions], list[Any]()
    for turn in range(max(map(len, sessions))):
        for prompts, counts in zip(sessions, repeated, strict=True):
            if turn >= len(prompts):
                continue
            prompt, shared = np.array(prompts[turn]), [0]
            for other in sent:
                length = min(len(prompt), len(other))
                differs = prompt[:length] != other[:length]
                shared.append(int(differs.argmax()) if differs.any() else length)
            counts.append(min(max(shared), len(prompt) - 1))
            sent.append(prompt)
    return repeated


def body_of(model: str, prompt: Any, num_tokens: int) -> bytes:
    return _body(model, num_tokens, prompt=list(prompt))


def chat_body(model: str, prompt: Any, num_tokens: int) -> bytes:
    text = "".join(chr(ord("a") + token % 26) for token in prompt)
    starts = enumerate(range(0, len(text), MESSAGE_LETTERS))
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text[start : start + MESSAGE_LETTERS]}
        for i, start in starts
    ]
    return _body(model, num_tokens, messages=[*messages, {"role": "user", "content": "Go on."}])


def _body(model: str, num_tokens: int, **asked: Any) -> bytes:
    asked |= {"model": model, "max_tokens": num_tokens, "temperature": 0}
    stream = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(asked | stream).encode()


def tokens_of(url: str, bodies: Sequence[bytes]) -> list[Sequence[int]]:
    """Return the token ids that a server makes of the messages of these requests."""
    with http_client(url, timeout=ANSWER_TIMEOUT_S) as http:
        asked = [{"messages": json.loads(body)["messages"]} for body in bodies]
        answers = [http.post("/tokenize", json=each).raise_for_status() for each in asked]
    return [answer.json()["tokens"] for answer in answers]


def figures(answers: list[Answer], took_s: float) -> Row:
    """Return the row of a run, with times in ms."""
    num_prompt, num_cached, num_repeated = (
        sum(getattr(answer, name) for answer in answers)
        for name in ("prompt_tokens", "cached_tokens", "repeated_tokens")
    )
    row: Row = {"answers": len(answers), "wall_s": took_s}
    row |= {"answers_per_s": len(answers) / took_s}
    row |= crowd_figures.times(answers)
    row |= {"hit_rate": num_cached / num_prompt, "unbounded_hit_rate": num_repeated / num_prompt}
    return row | {"prompt_tokens": num_prompt}


@click.command(help=__doc__)
@click.option("--url", required=True, help="URL of the server, without `/v1`.")
@click.option("--server", "name", required=True, help="Server, version and flags, for the report.")
@click.option("--sessions", default=8, show_default=True, help="Sessions at once.")
@click.option("--seed", default="0", show_default=True, help="Seeds, one run each, with commas.")
@with_options(SESSIONS)
@click.option("--vocab-size", default=128_000, show_default=True, help="Token ids are below it.")
@click.option("--chat", "is_chat", is_flag=True, help="Send conversations, as above.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    url: str,
    name: str,
    sessions: int,
    seed: str,
    vocab_size: int,
    is_chat: bool,
    commit: str | None,
    **options: Any,
) -> None:
    model, shape = served_by(url), Shape(**options)
    rows, problems = list[Row](), list[str]()
    for each in map(int, seed.split(",")):
        scripts = make_scripts(sessions, each, shape, MAX_PROMPT_TOKENS, vocab_size)
        served = run(url, model, scripts, shape.until, is_chat=is_chat)
        answers, took_s, problem = asyncio.run(served)
        problems += [f"seed {each}: {problem}"] if problem else []
        if not answers:
            continue
        rows.append({"sessions": sessions, "seed": each, **figures(answers, took_s)})
        summary = (
            "{answers} answers, {answers_per_s:.2f} a second, TTFT p50 {ttft_ms[p50]:.0f} ms, "
        )
        summary += "p90 {ttft_ms[p90]:.0f} ms, p99 {ttft_ms[p99]:.0f} ms, hit rate {hit_rate:.3f} "
        summary += "of {unbounded_hit_rate:.3f}"
        click.echo(f"seed {each}: {summary.format(**rows[-1])}", err=True)
    report = raw.head(commit, "python -m tests.stress.sessions_by_url") | {"server": name}
    workload = shape.workload | {"model": model}
    click.echo(json.dumps(report | {"workload": workload, "rows": rows, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
