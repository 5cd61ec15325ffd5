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
they make. With `--thoughts` they are those of agents that think, see `thinking_agents`, whose
thoughts are kept, or dropped with the next question. A server without a tokenizer is sent the token
ids that another one, `--tokens-of`, makes of the conversations.

`cached_tokens` is what the server reports. `unbounded_hit_rate` is what a cache would find that
keeps all tokens of all prompts for ever, if the sessions took their turns one by one. A hit is an
answer with some cached tokens and with fewer than 2,048 other tokens in its prompt. `by_turn` has
both rates for each turn of the sessions. A request that fails ends its run; it is listed in
`problems`, and the exit code is 1.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import click
import httpx
import numpy as np

from tests.stress.client import measures_a_server, served_by
from tests.stress.thinking_agents import ChatTurn, Thoughts, write_conversations
from tieredkv.bench import crowd, crowd_figures, raw
from tieredkv.bench.sessions import MAX_PROMPT_TOKENS, Script, Shape, make_scripts
from tieredkv.cli.bench_options import SESSIONS, with_options
from tieredkv.http_clients import async_http_client, http_client

ANSWER_TIMEOUT_S = 300.0
MESSAGE_LETTERS = 1000

Row = dict[str, Any]


class Ask(NamedTuple):
    """One request of a session.

    Attributes:
        think_s: time between the answer before and this request.
        path: of the API that it is sent to.
        body: its bytes.
        prompt: the token ids that the server makes of it.
    """

    think_s: float
    path: str
    body: bytes
    prompt: Sequence[int]


class Answer(NamedTuple):
    """One answer: when its tokens came, in seconds after it was asked for, and its usage.

    Attributes:
        receipt: where the tokens of the prompt came from, if the server is tieredkv.
        repeated_tokens: how many of the prompt's first tokens an earlier prompt began with.
        turn: the number of its request in its session.
    """

    times_s: list[float]
    prompt_tokens: int
    cached_tokens: int
    receipt: Row
    repeated_tokens: int = 0
    turn: int = 0

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
    url: str, sessions: list[list[Ask]], until: str = "first"
) -> tuple[list[Answer], float, str]:
    """Run sessions until the `first` or the `last` one has ended, or until a request fails.

    Returns:
        The answers, the seconds from the start to the last one, and what failed.
    """
    repeated = repeated_tokens([[each.prompt for each in asks] for asks in sessions])
    answers = list[Answer]()
    start, took_s = perf_counter(), 0.0

    async def hold(session: int) -> None:
        nonlocal took_s
        asks = zip(sessions[session], repeated[session], strict=True)
        for turn, (each, count) in enumerate(asks):
            await asyncio.sleep(each.think_s)
            answer = await ask(http, each.body, each.path)
            answers.append(answer._replace(repeated_tokens=count, turn=turn))
            took_s = perf_counter() - start

    options: Row = {"timeout": ANSWER_TIMEOUT_S, "limits": httpx.Limits(max_connections=None)}
    async with async_http_client(url, **options) as http:
        tasks = [asyncio.create_task(hold(session)) for session in range(len(sessions))]
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


def asked_ids(model: str, scripts: Iterable[Script]) -> list[list[Ask]]:
    """Return the requests of sessions that are sent as token ids."""
    return [[_ask_ids(model, *turn) for turn in script] for script in scripts]


def asked_chats(
    model: str, conversations: Iterable[list[ChatTurn]], tokenizer: str, *, as_ids: bool
) -> list[list[Ask]]:
    """Return the requests of conversations.

    Args:
        model: the name that the server has for it.
        conversations: their turns.
        tokenizer: URL of the server that says which token ids messages are.
        as_ids: whether these are sent, and not the messages.
    """
    sessions = list[list[Ask]]()
    for turns in conversations:
        asks = list[Ask]()
        prompts = tokens_of(tokenizer, [turn.messages for turn in turns])
        for turn, prompt in zip(turns, prompts, strict=True):
            if as_ids:
                asks.append(_ask_ids(model, turn.think_s, prompt, turn.answer_tokens))
            else:
                body = _body(model, turn.answer_tokens, messages=turn.messages)
                asks.append(Ask(turn.think_s, "/v1/chat/completions", body, prompt))
        sessions.append(asks)
    return sessions


def chat_of(script: Script) -> list[ChatTurn]:
    """Return a session as a conversation; see `--chat`."""
    turns = list[ChatTurn]()
    for turn in script:
        text = "".join(chr(ord("a") + token % 26) for token in turn.prompt)
        starts = enumerate(range(0, len(text), MESSAGE_LETTERS))
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text[start : start + MESSAGE_LETTERS]}
            for i, start in starts
        ]
        asked = [*messages, {"role": "user", "content": "Go on."}]
        turns.append(ChatTurn(turn.think_s, asked, turn.answer_tokens))
    return turns


def _ask_ids(model: str, think_s: float, prompt: Sequence[int], num_tokens: int) -> Ask:
    return Ask(think_s, "/v1/completions", body_of(model, prompt, num_tokens), prompt)


def body_of(model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    return _body(model, num_tokens, prompt=list(prompt))


def _body(model: str, num_tokens: int, **asked: Any) -> bytes:
    asked |= {"model": model, "max_tokens": num_tokens, "temperature": 0}
    stream = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(asked | stream).encode()


def tokens_of(url: str, chats: Iterable[list[Row]]) -> list[Sequence[int]]:
    """Return the token ids that a server makes of the messages of some requests."""
    with http_client(url, timeout=ANSWER_TIMEOUT_S) as http:
        asked = [{"messages": messages} for messages in chats]
        answers = [http.post("/tokenize", json=each).raise_for_status() for each in asked]
    return [answer.json()["tokens"] for answer in answers]


def figures(answers: list[Answer], took_s: float) -> Row:
    """Return the row of a run, with times in ms."""
    row: Row = {"answers": len(answers), "wall_s": took_s}
    row |= {"answers_per_s": len(answers) / took_s}
    row |= crowd_figures.times(answers) | _hit_rates(answers)
    row["by_turn"] = [
        _hit_rates([answer for answer in answers if answer.turn == turn])
        for turn in sorted({answer.turn for answer in answers})
    ]
    return row


def _hit_rates(answers: list[Answer]) -> Row:
    num_prompt, num_cached, num_repeated = (
        sum(getattr(answer, name) for answer in answers)
        for name in ("prompt_tokens", "cached_tokens", "repeated_tokens")
    )
    rates = {"hit_rate": num_cached / num_prompt, "unbounded_hit_rate": num_repeated / num_prompt}
    return rates | {"prompt_tokens": num_prompt}


@click.command(help=__doc__)
@measures_a_server
@click.option("--sessions", default=8, show_default=True, help="Sessions at once.")
@click.option("--seed", default="0", show_default=True, help="Seeds, one run each, with commas.")
@with_options(SESSIONS)
@click.option("--chat", "is_chat", is_flag=True, help="Send conversations, as above.")
@click.option(
    "--thoughts", type=click.Choice(["kept", "dropped"]), help="Of agents that think, as above."
)
@click.option("--tokens-of", "tokenizer", help="URL of the server that makes token ids, as above.")
def main(
    url: str,
    name: str,
    sessions: int,
    seed: str,
    vocab_size: int,
    is_chat: bool,
    thoughts: Thoughts | None,
    tokenizer: str | None,
    commit: str | None,
    **options: Any,
) -> None:
    model, shape = served_by(url), Shape(**options)
    rows, problems = list[Row](), list[str]()
    for each in map(int, seed.split(",")):
        how: Row = {"tokenizer": tokenizer or url, "as_ids": tokenizer is not None}
        if thoughts is not None:
            asked = asked_chats(model, write_conversations(sessions, each, shape, thoughts), **how)
        else:
            scripts = make_scripts(sessions, each, shape, MAX_PROMPT_TOKENS, vocab_size)
            asked = asked_ids(model, scripts)
            if is_chat:
                asked = asked_chats(model, map(chat_of, scripts), **how)
        answers, took_s, problem = asyncio.run(run(url, asked, shape.until))
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
    workload = shape.workload | {"model": model, "chat": is_chat, "thoughts": thoughts}
    click.echo(json.dumps(report | {"workload": workload, "rows": rows, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
