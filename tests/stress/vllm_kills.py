"""Lets agents take turns on vLLM while the worker of tieredkv's tier is killed again and again.

    python -m tests.stress.vllm_kills --folder /nvme/kv --model-dir /dev/shm/model --minutes 8

Sessions of `tieredkv bench sessions` take turns on a `vllm serve` with our tier, whose worker gets
SIGKILL every `--kill-every` seconds. When all sessions have ended, those of the next seed begin.
With `--tier-options '{"restore": "load"}'` all that the disk has is loaded; else what is computed
sooner is computed. A server without tiers answers the same prompts, afterwards or, with
`--beside`, at the same time: then both share the GPU, so that `--flags` and `--beside-flags` must
divide its memory between them.

A request without an answer is lost. Each token of each answer is compared with the one that the
second server computes behind the same tokens. It is `equal`; a `tie` if the second server has it
among the 20 likeliest and nearly as likely as its own (`--tie`), since in bfloat16 the order of
computing decides such a case: it moves each logit by up to 0.26 with the shapes of Llama-3.1-8B;
else it is `wrong`, and the rest of that answer is not compared. `ties_by_rank` counts ties by the
token's place among the likeliest.

The exit code is 1 if a request was lost, a token was wrong, or no worker was killed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, NamedTuple

import click
import httpx

from tests.stress.client import difference, gap, served_by
from tests.stress.vllm_server import Server, Setup, with_setup, worker_of
from tieredkv.bench import raw
from tieredkv.bench.sessions import Shape, Turn, write_script
from tieredkv.http_clients import async_http_client

TIMEOUT_S = 300.0
AT_ONCE = 12  # whose prompts the second server has to keep while it goes on behind ties
NUM_TOPS = 20  # the most that vLLM tells unless it is started with --max-logprobs
TOKEN_ID = "token_id:"
Row = dict[str, Any]


class Answer(NamedTuple):
    """The tokens of an answer, such as `token_id:17`, and the likeliest ones of each place."""

    tokens: list[str]
    tops: list[dict[str, float]]
    cached_tokens: int


Answers = asyncio.Queue[tuple[Turn, Answer] | None]
"""Turns and their answers; None once there are no more."""


async def ask(http: httpx.AsyncClient, model: str, turn: Turn) -> Answer:
    """Send a request for a completion.

    Raises:
        httpx.HTTPError: it was refused, or broke off.
    """
    body: Row = {"model": model, "prompt": list(turn.prompt), "max_tokens": turn.answer_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": NUM_TOPS}
    body |= {"return_tokens_as_token_ids": True}
    response = await http.post("/v1/completions", json=body)
    response.raise_for_status()
    answer = response.json()
    logprobs = answer["choices"][0]["logprobs"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Answer(logprobs["tokens"], logprobs["top_logprobs"], details.get("cached_tokens") or 0)


class Comparison:
    """Asks a server without tiers what another one was asked, some prompts at a time.

    Attributes:
        counts: how many tokens are equal, ties and wrong.
        ranks: how many ties were the second likeliest, the third, and so on.
        wrong: where the wrong ones are.
    """

    def __init__(self, tie: float) -> None:
        self.counts = {"equal": 0, "tie": 0, "wrong": 0}
        self.ranks = Counter[int]()
        self.wrong = list[str]()
        self._tie = tie

    async def run(self, url: str, answers: Answers) -> None:
        """Compare answers until None follows them."""
        model = served_by(url)
        async with async_http_client(url, timeout=TIMEOUT_S) as http:
            await asyncio.gather(*(self._take(http, model, answers) for _ in range(AT_ONCE)))

    async def _take(self, http: httpx.AsyncClient, model: str, answers: Answers) -> None:
        while (told := await answers.get()) is not None:
            await self.compare(http, model, *told)
        answers.put_nowait(None)  # for the others

    async def compare(
        self, http: httpx.AsyncClient, model: str, turn: Turn, answer: Answer
    ) -> None:
        """Compare the tokens of one answer; behind each tie, the server goes on from its token."""
        prompt, tokens = [*turn.prompt], answer.tokens
        while tokens:
            rest = turn._replace(prompt=prompt, answer_tokens=len(tokens))
            expected = await ask(http, model, rest)
            kind, place = difference(expected.tokens, expected.tops, tokens, self._tie)
            num_equal = len(tokens) if kind == "equal" else place
            self.counts["equal"] += num_equal
            if kind == "equal":
                return
            self.counts[kind] += 1
            if kind == "wrong":
                where = f"token {len(answer.tokens) - len(tokens) + place} of an answer"
                found = f"{len(turn.prompt)} tokens asked, {answer.cached_tokens} found"
                less = gap(expected.tops[place], tokens[place])
                self.wrong.append(f"{where}, {found}, less likely by {less:.3f}")
                return
            top = expected.tops[place]
            self.ranks[1 + sum(each > top[tokens[place]] for each in top.values())] += 1
            prompt += [int(token.removeprefix(TOKEN_ID)) for token in tokens[: place + 1]]
            tokens = tokens[place + 1 :]


class Crowd:
    """Sessions that take turns on a server for some time.

    Attributes:
        asked: all turns that were answered.
        num_answers: how many there are.
        prompt_tokens, cached_tokens: of these.
        lost: what happened to the turns that were not answered.
    """

    def __init__(self, url: str, shape: Shape, vocab_size: int) -> None:
        self.asked: Answers = asyncio.Queue()
        self.num_answers = self.prompt_tokens = self.cached_tokens = 0
        self.lost = list[str]()
        self._url, self._shape, self._vocab_size = url, shape, vocab_size
        self._model = served_by(url)

    async def run(self, sessions: int, minutes: float) -> None:
        """Run sessions, seed after seed, until the time is over."""
        try:
            await self._run(sessions, minutes)
        finally:
            self.asked.put_nowait(None)

    async def _run(self, sessions: int, minutes: float) -> None:
        until = time.monotonic() + 60 * minutes
        limits = httpx.Limits(max_connections=None)
        async with async_http_client(self._url, timeout=TIMEOUT_S, limits=limits) as http:
            for seed in itertools.count():
                if time.monotonic() >= until:
                    return
                await asyncio.gather(
                    *(self._hold(http, seed, session, until) for session in range(sessions))
                )

    async def _hold(self, http: httpx.AsyncClient, seed: int, session: int, until: float) -> None:
        for turn in write_script(seed, session, self._shape, self._vocab_size):
            if time.monotonic() >= until:
                return
            await asyncio.sleep(turn.think_s)
            try:
                answer = await ask(http, self._model, turn)
            except httpx.HTTPError as error:
                self.lost.append(f"{type(error).__name__}: {error}")
                continue
            self.num_answers += 1
            self.prompt_tokens += len(turn.prompt)
            self.cached_tokens += answer.cached_tokens
            self.asked.put_nowait((turn, answer))


async def kill_now_and_then(server: Server, every_s: float, killed: list[int]) -> None:
    """Kill the store's worker at equal times, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        if (pid := worker_of(server)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)


async def take_turns(
    server: Server,
    crowd: Crowd,
    sessions: int,
    minutes: float,
    every_s: float,
    beside: Coroutine[Any, Any, None] | None,
) -> list[int]:
    """Run a crowd, and what is to run beside it, while workers are killed; return which were."""
    killed = list[int]()
    killing = asyncio.create_task(kill_now_and_then(server, every_s, killed))
    comparing = None if beside is None else asyncio.create_task(beside)
    try:
        await crowd.run(sessions, minutes)
    finally:
        killing.cancel()
    if comparing is not None:
        await comparing
    return killed


@click.command(help=__doc__)
@click.option("--sessions", default=8, show_default=True, help="Sessions at once.")
@click.option("--minutes", default=8.0, show_default=True, help="For which they take turns.")
@click.option("--kill-every", default=30.0, show_default=True, help="Seconds between kills.")
@click.option("--scale", default=1.0, show_default=True, help="Prompts are shorter by it.")
@click.option("--tie", default=0.5, show_default=True, help="See above.")
@click.option("--beside", is_flag=True, help="Have both servers answer at the same time.")
@click.option("--beside-flags", help="Flags of the second server, if not --flags.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
@with_setup
def main(
    setup: Setup,
    sessions: int,
    minutes: float,
    kill_every: float,
    scale: float,
    tie: float,
    beside: bool,
    beside_flags: str | None,
    commit: str | None,
) -> None:
    vocab_size, folder = setup.config["vocab_size"], setup.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    comparison = Comparison(tie)
    shape = Shape(turns=15, scale=scale, trace=None)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(setup.serving(setup.tier("tieredkv", folder)))
        crowd = Crowd(server.url, shape, vocab_size)
        comparing = None
        if beside:
            second = setup.beside(setup.flags if beside_flags is None else beside_flags)
            other = stack.enter_context(second.serving(None, has_memory=False))
            comparing = comparison.run(other.url, crowd.asked)
        turns = take_turns(server, crowd, sessions, minutes, kill_every, comparing)
        killed, metrics = asyncio.run(turns), server.metrics()
    told = f"{crowd.num_answers} answers, {len(crowd.lost)} lost, {len(killed)} kills"
    click.echo(told, err=True)
    if not beside:
        with setup.serving(None, has_memory=False) as server:
            asyncio.run(comparison.run(server.url, crowd.asked))
    shutil.rmtree(folder, ignore_errors=True)
    problems = [*crowd.lost, *comparison.wrong]
    problems += [] if killed else ["no worker was killed"]
    report = raw.head(commit, "python -m tests.stress.vllm_kills")
    report |= {"answers": crowd.num_answers, "lost": len(crowd.lost), "kills": len(killed)}
    report |= {"hit_rate": crowd.cached_tokens / max(1, crowd.prompt_tokens)}
    report |= {"tokens": comparison.counts, "ties_by_rank": dict(sorted(comparison.ranks.items()))}
    report |= {"metrics": metrics, "problems": problems}
    click.echo(json.dumps(report))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
