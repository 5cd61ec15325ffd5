"""`tieredkv warm`: has a running server compute prompts, so that later requests find them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

import click
import httpx
import msgspec

from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.http_answers import reason_of, unreachable, warn_if_key_is_readable
from tieredkv.cli.output import Answer, answering, usage_error
from tieredkv.errors import ConfigError, RequestError
from tieredkv.http_clients import async_http_client
from tieredkv.types import Progress

TIMEOUT_S = 600.0
MOST_TRIES = 100
"""How often a request is sent that the server is too busy for."""

Json = dict[str, Any]


class Prompt(NamedTuple):
    """A request that asks for as few tokens as its API allows.

    Attributes:
        line: its number in the file.
        path: of the endpoint.
        body: without the model, unless the line names one.
    """

    line: int
    path: str
    body: Json


class Warmed(msgspec.Struct, kw_only=True):
    """What became of the prompts.

    Attributes:
        cached_tokens: prompt tokens that were there already.
        failed: answers that were errors, by the number of the line.
    """

    prompts: int = 0
    sent: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: dict[int, str] = {}

    def count(self, usage: Json) -> None:
        """Count one answer by what its API says of the prompt."""
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", usage.get("cache_read_input_tokens")) or 0
        beside = 0
        if "cache_read_input_tokens" in usage:  # of Messages, which counts them apart
            beside = cached + (usage.get("cache_creation_input_tokens") or 0)
        self.prompt_tokens += beside + (
            usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        )
        self.cached_tokens += cached


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--url", default="http://127.0.0.1:8000", help="URL of the server, without /v1.")
@click.option("--api-key", help="API key, if the server needs one. Its tenant has the blocks.")
@click.option(
    "--retention",
    help="Retention of the prompts that name none, such as 24h. A body for /v1/messages has it in "
    "`cache_control`, and is refused beside this option.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=4, help="How many prompts are computed at once."
)
@answering
def warm(file: BinaryIO, url: str, api_key: str | None, retention: str | None, jobs: int) -> Answer:
    """Have a running server compute the prompts in FILE, so that later requests find them.

    FILE has one JSON value a line (- is stdin): a text, a list of chat messages, or the body of a
    request to one of the APIs, with its tools, its `cache_salt` and so on. Each is sent as such a
    request, but for as few tokens as its API allows. Prompts that are cached already take next to
    no time. Blocks reach the disk as for any other request: if their retention allows it, and when
    `disk_write` says so.

    The exit code is 1 if the server has refused a prompt, and 3 if it does not answer. Ctrl-C stops
    after the prompts that have been answered.

    \b
    Examples:
      tieredkv warm system-prompts.jsonl --retention 24h
      jq -c .body requests.jsonl | tieredkv warm - --url http://gpu1:8000 --jobs 8
    """
    if not (prompts := list(read_prompts(file, retention))):
        raise usage_error("FILE has no prompt; write one JSON value a line.")
    warn_if_key_is_readable(url, api_key)
    warmed = Warmed(prompts=len(prompts))
    progress = terminal_progress(lambda line: click.echo(line, err=True))
    is_cut = False
    try:
        asyncio.run(_send(prompts, url, api_key, jobs, warmed, progress))
    except KeyboardInterrupt:
        is_cut = True
    for line, why in sorted(warmed.failed.items()):
        click.echo(f"error: line {line}: {why}", err=True)
    told = f"{warmed.sent} of {warmed.prompts} prompts, {warmed.prompt_tokens} tokens"
    told = f"{told}, of which {warmed.cached_tokens} were cached already"
    lines = [f"{told}; {len(warmed.failed)} refused" if warmed.failed else told]
    document = msgspec.to_builtins(warmed, str_keys=True)
    return Answer(document, lines=lines, is_problem=is_cut or bool(warmed.failed))


def read_prompts(file: Iterable[bytes], retention: str | None) -> Iterable[Prompt]:
    """Yield the prompts of a file.

    Raises:
        ConfigError: a line is no prompt, or cannot have the retention; names the line.
    """
    from tieredkv.fields import decode_json
    from tieredkv.server.anthropic_api import MessagesRequest
    from tieredkv.server.inspected import as_request
    from tieredkv.server.openai_api import ChatRequest, CompletionRequest

    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            kind, body = as_request(decode_json(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RequestError) as error:
            raise ConfigError(f"line {number}: {error}") from None
        few: Json = {"stream": False}
        if kind is MessagesRequest:
            path, few["max_tokens"] = "/v1/messages", 0
            if retention is not None:
                why = "is for `/v1/messages`, where `cache_control` has the retention"
                raise ConfigError(f"line {number} {why}; leave --retention out")
        elif kind is CompletionRequest:
            path, few["max_tokens"] = "/v1/completions", 1
        elif kind is ChatRequest:
            path, few["max_completion_tokens"] = "/v1/chat/completions", 1
        else:
            path, options = "/v1/responses", body.get("prompt_cache_options") or {}
            few["prompt_cache_options"] = {**options, "prewarm": True}
            few["store"] = False
        if retention is not None:
            body = {"prompt_cache_retention": retention, **body}
        yield Prompt(number, path, {**body, **few})


async def _send(
    prompts: Sequence[Prompt],
    url: str,
    api_key: str | None,
    jobs: int,
    warmed: Warmed,
    progress: Progress,
) -> None:
    """Send all prompts, some at once, and count what is answered."""
    async with _connected(url, api_key) as (http, model):
        waiting = iter(prompts)

        async def work() -> None:
            for prompt in waiting:
                answer = await _ask(http, prompt, {"model": model, **prompt.body})
                warmed.sent += 1
                if answer.is_success:
                    warmed.count(answer.json().get("usage") or {})
                else:
                    warmed.failed[prompt.line] = reason_of(answer)
                progress("warming", warmed.sent, len(prompts))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(jobs):
                    group.create_task(work())
        except* httpx.HTTPError as errors:
            raise unreachable(url, errors.exceptions[0]) from None


async def _ask(http: httpx.AsyncClient, prompt: Prompt, body: Json) -> httpx.Response:
    """Send a prompt, again and again while the server is too busy for it."""
    for _ in range(MOST_TRIES):
        answer = await http.post(prompt.path, json=body)
        if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
            break
        await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
    return answer


@contextlib.asynccontextmanager
async def _connected(url: str, api_key: str | None) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Return a client of a server, and the name of its model.

    Raises:
        ServerUnreachableError: it does not answer.
        ConfigError: it refuses the key.
    """
    headers = {b"Authorization": b"Bearer " + api_key.encode()} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    try:
        http = async_http_client(url, headers=headers, timeout=TIMEOUT_S, limits=limits)
    except httpx.InvalidURL as error:
        raise unreachable(url, error) from None
    async with http:
        try:
            answer = await http.get("/v1/models")
            if not answer.is_success:
                raise ConfigError(f"`{url}` refuses: {reason_of(answer)}")
            model = msgspec.json.decode(answer.content)["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(url, error) from None
        except (msgspec.DecodeError, LookupError, TypeError):
            what = f"`{url}` names no models, as a tieredkv server does"
            raise ConfigError(f"{what}; give the URL of one, without /v1") from None
        yield http, model
