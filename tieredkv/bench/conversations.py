"""`bench serve`: conversations with think times against a running server, as clients see it.

Conversations begin at random moments, at a given rate, whether or not the server keeps up (open
loop). All conversations share one system prompt. Each turn sends the conversation so far with a new
user message, waits for the whole streamed answer, and then thinks. An answer counts for the slowest
tier that its prefix came from, as `usage` reports. A row is one retention at one rate.

Texts consist of random letters, as many as the server's tokenizer needs for the wanted number of
tokens. Each row has its own cache salt: it cannot reuse blocks of earlier rows, but those blocks
still occupy the tiers.
"""

import asyncio
import itertools
import json
import random
import string
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import httpx
import numpy as np

from tieredkv.bench import raw
from tieredkv.errors import ConfigError, ServerUnreachableError
from tieredkv.http_clients import async_http_client
from tieredkv.types import Progress, Tier, tracked

ANSWER_TIMEOUT_S = 300.0
CALIBRATION_CHARS = 1000
LETTERS = string.ascii_lowercase + 5 * " "
SOURCES = ("cold", *Tier)
COLUMNS: tuple[str, ...] = ("retention", "rate", "answers", "failed", "hit_rate", "output_tok_s")
COLUMNS += ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
COLUMNS += tuple(f"{source}_ttft_p50_ms" for source in SOURCES)
PLOTTED = (("ttft_p50_ms", "ttft_p90_ms"),)

Row = dict[str, Any]


class Workload(NamedTuple):
    """The work of the clients.

    Attributes:
        duration: seconds in which conversations begin; they go on for as long again.
        turns: answers in a conversation.
        think: mean seconds between an answer's end and the next turn.
        system_tokens, user_tokens, answer_tokens: approximate tokens of each text.
    """

    duration: float
    turns: int
    think: float
    system_tokens: int
    user_tokens: int
    answer_tokens: int


@dataclass
class Turn:
    """One answer as a client saw it: when it was requested, and when each piece of text arrived."""

    began_at: float
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    usage: Row = field(default_factory=dict)
    error: str = ""

    def take(self, event: Row) -> None:
        """Record one event of the stream."""
        self.error = str(event.get("error") or "")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            if "role" not in choice["delta"] and not choice["finish_reason"]:
                self.chunk_times.append(time.perf_counter())
                self.text += choice["delta"].get("content") or ""

    def cached(self) -> tuple[int, str]:
        """Return the number of cached tokens and the slowest tier that held any, or `cold`."""
        details = self.usage.get("prompt_tokens_details") or {}
        count = details.get("cached_tokens") or 0
        by_tier = details.get("cached_tokens_by_tier") or {"cached": count}
        return count, ["cold", *(tier for tier, tokens in by_tier.items() if tokens)][-1]


class Client:
    """Holds conversations with one server."""

    def __init__(self, http: httpx.AsyncClient, workload: Workload) -> None:
        self._http, self._workload, self.model, self._chars_a_token = http, workload, "", 1.0

    async def begin(self) -> None:
        """Ask the server for the model's name and for the number of letters in a token.

        Raises:
            ConfigError: the server refuses these questions, as without its API key.
            ServerUnreachableError: it does not answer them.
        """
        letters = {"prompt": self._text(random.Random(1), CALIBRATION_CHARS)}
        try:
            models = (await self._http.get("/v1/models")).raise_for_status()
            counts = (await self._http.post("/tokenize", json=letters)).raise_for_status()
            self.model, counted = models.json()["data"][0]["id"], counts.json()["count"]
        except httpx.HTTPStatusError as error:
            what = f"`{self._http.base_url}` refuses: status {error.response.status_code}"
            raise ConfigError(f"{what}\nhint: give --api-key, if the server needs one") from None
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise _unreachable(str(self._http.base_url), error) from None
        self._chars_a_token = CALIBRATION_CHARS / counted

    async def measure(self, rate: float, retention: str) -> Row:
        """Start conversations at a rate; return the row of the report when all have ended."""
        workload, turns, at_s = self._workload, list[Turn](), 0.0
        body = {"prompt_cache_retention": retention or None}
        body["cache_salt"] = random.randbytes(8).hex()
        generator, start = random.Random(rate), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while (at_s := at_s + generator.expovariate(rate)) < workload.duration:
                each = random.Random(generator.random())
                end_at = start + 2 * workload.duration
                group.create_task(self._converse(at_s, end_at, each, body, turns))
        return _row(rate, retention, turns, time.perf_counter() - start)

    async def _converse(
        self, pause_s: float, end_at: float, generator: random.Random, body: Row, turns: list[Turn]
    ) -> None:
        system = self._text(random.Random(2), self._workload.system_tokens)
        messages = [{"role": "system", "content": system}]
        for _ in range(self._workload.turns):
            await asyncio.sleep(pause_s)
            if time.perf_counter() > end_at:
                return
            text = self._text(generator, self._workload.user_tokens)
            messages.append({"role": "user", "content": text})
            turns.append(turn := await self._answer(messages, **body))
            if turn.error:
                return
            messages.append({"role": "assistant", "content": turn.text})
            pause_s = generator.expovariate(1 / self._workload.think)

    async def _answer(self, messages: list[Row], **body: Any) -> Turn:
        length = {"max_completion_tokens": self._workload.answer_tokens, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        asked = {"model": self.model, "messages": messages, **length, **stream, **body}
        turn = Turn(time.perf_counter())
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.status_code != httpx.codes.OK:
                    turn.error = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                    return turn
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        turn.take(json.loads(line[len("data: ") :]))
        except httpx.HTTPError as error:
            turn.error = f"{type(error).__name__}: {error}"
        if not (turn.error or turn.chunk_times):
            turn.error = "the answer had no text"
        return turn

    def _text(self, generator: random.Random, num_tokens: int) -> str:
        return "".join(generator.choices(LETTERS, k=round(num_tokens * self._chars_a_token)))


def run(
    progress: Progress,
    *,
    url: str,
    api_key: str | None,
    rates: list[float],
    retentions: list[str],
    **workload: Any,
) -> Row:
    """Measure a running server.

    Raises:
        ConfigError, ServerUnreachableError: see `Client.begin`.
    """
    asked, cases = Workload(**workload), list(itertools.product(rates, retentions))
    options: Row = {"timeout": ANSWER_TIMEOUT_S, "limits": httpx.Limits(max_connections=None)}
    if api_key:
        options["headers"] = {"Authorization": f"Bearer {api_key}"}

    async def measure() -> tuple[str, list[Row]]:
        async with async_http_client(url, **options) as http:
            client = Client(http, asked)
            await client.begin()
            done = [await client.measure(*case) for case in tracked(progress, "measuring", cases)]
            return client.model, done

    try:
        model, rows = asyncio.run(measure())
    except httpx.InvalidURL as error:
        raise _unreachable(url, error) from None
    errors = [(row["retention"], row["rate"], row.pop("error")) for row in rows]
    problems = [f"{retention} at {rate}/s: {error}" for retention, rate, error in errors if error]
    facts = {"model": model, "workload": asked._asdict()}
    return {**facts, "raw": {}, "rows": rows, "problems": problems}


def _unreachable(url: str, error: Exception) -> ServerUnreachableError:
    hint = "hint: start a server, and give its URL without /v1"
    return ServerUnreachableError(f"`{url}` does not answer: {error!r}\n{hint}")


def _row(rate: float, retention: str, turns: list[Turn], wall_s: float) -> Row:
    """Return the report's row for one rate and retention; times are in ms."""
    good = [turn for turn in turns if not turn.error]
    cached, sources = zip(*(turn.cached() for turn in good), strict=True) if good else ((), ())
    firsts_ms = [1e3 * (turn.chunk_times[0] - turn.began_at) for turn in good]
    percentiles = partial(raw.percentiles_ms, shares=(50, 90, 99))
    gaps_ms = [1e3 * gap for turn in good for gap in np.diff(turn.chunk_times)]
    prompt = sum(turn.usage["prompt_tokens"] for turn in good)
    row: Row = {"retention": retention or "default", "rate": rate, "answers": len(good)}
    row |= {"failed": len(turns) - len(good), "hit_rate": sum(cached) / max(1, prompt)}
    row |= {"prompt_tok_s": prompt / wall_s, "output_tok_s": len(gaps_ms) / wall_s}
    row |= percentiles("ttft", firsts_ms) | percentiles("itl", gaps_ms)
    for name in SOURCES:
        some_ms = [ms for source, ms in zip(sources, firsts_ms, strict=True) if source == name]
        row |= {f"{name}_answers": len(some_ms)} | percentiles(f"{name}_ttft", some_ms)
    return row | {"error": next((turn.error for turn in turns if turn.error), "")}
