"""Measures vLLM's time to the first token by the tier that a prefix comes from.

\b
    python -m tests.stress.vllm_tiers --folder /nvme/kv --model-dir /dev/shm/model

It runs `vllm serve` for each of `--tiers`, which are `ram`, vLLM's own memory behind VRAM and
nothing else; `fs`, vLLM's own disk tier; and `tieredkv`. Prompts are random token ids, one request
at a time. The arms take turns, for each prompt in this order:

\b
    cold     the prompt was never sent before
    device   it was sent a moment ago
    host     VRAM's prefix cache was emptied
    disk     vLLM's memory was emptied too
    kill     vLLM's memory was emptied, and the worker of our tier is killed meanwhile
    killed   vLLM's memory was emptied, and our tier has another worker
    restart  the server was stopped and started again; left out with `--no-restart`
    expired  vLLM's memory was emptied, and our tier's clock was turned by 25 hours

\b
`kill`, `killed` and `expired` are measured of our tier only, with `--faults`.

`bytes_from_disk` are those that the kernel read from storage for the server's processes during the
request, and `GBps` what they come to over the time in which the first token came. `raw_GBps`, the
rate of the disk with O_DIRECT (the best of 4, 16 and 32 threads), is measured before each server is
started. The tokens of `device`, with which no tier has to do, are compared with the cold ones of
the same prompt, and those of the other arms with those of `device`, which computes as little as
they do. It is a problem if the first token that differs has a log-probability of more than `--tie`
below that of the right one: in bfloat16 the order of computing moves each logit by up to 0.26 with
the shapes of Llama-3.1-8B.

A prompt that only ends like another one must be answered differently (`other`), else a wrong block
would not be seen. `gaps` has what each other token was less likely by, none where it was not told.

With `restore = auto`, the default, our tier computes what that promises to be faster for, and
`num_loaded` tells of how many prompts anything was loaded.

The exit code is 1 if there are problems, such as a hit that was none where all must be loaded.
"""

import functools
import json
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click

from tests.stress.client import NUM_TOPS, Prompt, difference, gap, prompts_of, served_by
from tests.stress.vllm_server import (
    SETTLED_S,
    Server,
    Setup,
    stored_bytes,
    wait_until_stored,
    with_setup,
    worker_of,
)
from tieredkv.bench import raw
from tieredkv.cli.bench_options import several
from tieredkv.config import CLOCK_OFFSET_VARIABLE
from tieredkv.http_clients import http_client

ARMS = ("cold", "device", "host", "disk", "restart")
DISK_ARMS = ("disk", "killed", "restart")
MISS_ARMS = ("cold", "expired")
ANSWER_TOKENS = 24  # so that some steps follow a prompt, by which our tier learns its time
RAW_BYTES = 1 << 30
KILL_AFTER_S = 0.03  # from the request; a lookup takes some steps
EXPIRED_S = 25 * 3600.0
COMMON_TOKENS = 16  # at the end of two prompts
MIN_HIT = 0.9  # of a prompt
MIN_STORED = 0.98
Row = dict[str, Any]


class Answer(NamedTuple):
    """An answer: its tokens, the log-probabilities of the two best of each, and its usage."""

    ttft_ms: float
    tokens: list[str]
    tops: list[dict[str, float]]
    cached_tokens: int
    bytes_from_disk: int


def ask(server: Server, model: str, prompt: Prompt) -> Answer:
    """Send a request for a streamed completion, and read its answer to the end."""
    body: Row = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": NUM_TOPS}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    data, before = json.dumps(body).encode(), server.bytes_from_disk()
    headers = {"Content-Type": "application/json"}
    tokens, tops, usage = list[str](), list[dict[str, float]](), dict[str, Any]()
    with http_client(server.url, timeout=300) as http:
        start, first_ms = perf_counter(), 0.0
        with http.stream("POST", "/v1/completions", content=data, headers=headers) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    first_ms = first_ms or 1e3 * (perf_counter() - start)
                    logprobs = choice.get("logprobs") or {}
                    tokens += logprobs.get("tokens", [])
                    tops += logprobs.get("top_logprobs", [])
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(first_ms, tokens, tops, cached, server.bytes_from_disk() - before)


class Measuring:
    """What one server with one tier gives.

    Args:
        tier, folder: see `tier_config`; the folder must not exist yet.
        kv_bytes: that a token has on disk.
        tie: difference of log-probabilities up to which two tokens count as equally likely.
        may_compute: whether the tier may compute what it has.
        has_faults: whether the worker is killed and the clock is turned.
    """

    def __init__(
        self,
        tier: str,
        folder: Path,
        kv_bytes: int,
        tie: float,
        *,
        may_compute: bool = False,
        has_faults: bool = False,
    ) -> None:
        self.tier, self.folder, self.kv_bytes, self.tie = tier, folder, kv_bytes, tie
        self.may_compute, self.has_faults = may_compute, has_faults
        self.offset_file = folder.with_name(f"{folder.name}.offset")
        self.offset_file.write_text("0")
        self._block_tokens = 1
        self.answers: dict[tuple[str, int], list[Answer]] = {}
        self.texts: dict[tuple[str, int], list[str]] = {}
        self.gaps: dict[tuple[str, int], list[float | None]] = {}
        self.problems = list[str]()
        self._right: list[tuple[int, Prompt, Answer]] = []

    def run(self, server: Server, lengths: list[int], repeats: int, vocab_size: int) -> None:
        """Measure all arms but `restart` and `expired`."""
        model = served_by(server.url)
        self._block_tokens = server.block_tokens
        for length in lengths:  # the first of its length may compile kernels
            [prompt] = prompts_of(1, length, vocab_size, ("warm", length))
            ask(server, model, prompt)
        for repeat in range(repeats):
            for length in lengths:
                [prompt] = prompts_of(1, length, vocab_size, (self.tier, length, repeat))
                self._take_turns(server, model, length, prompt)
        for length, prompt, right in self._right[: len(lengths)]:
            self._other(server, model, vocab_size, length, prompt, right)

    def _take_turns(self, server: Server, model: str, length: int, prompt: Prompt) -> None:
        stored = 0 if self.tier == "ram" else stored_bytes(self.tier, self.folder)
        time.sleep(SETTLED_S)  # as long as nothing is computed before `disk`
        cold = self.note("cold", length, ask(server, model, prompt), None)
        right = self.note("device", length, ask(server, model, prompt), cold)
        server.reset(memory=False)
        self.note("host", length, ask(server, model, prompt), right)
        if self.tier == "ram":
            return
        wanted = stored + int(MIN_STORED * self.kv_bytes * self._whole(length))
        if not wait_until_stored(self.tier, self.folder, wanted):
            self.problems.append(f"{self.tier} {length}: the prompt was not stored")
        server.reset(memory=True)
        self.note("disk", length, ask(server, model, prompt), right)
        if self.has_faults:
            self._kill(server, model, length, prompt, right)
        self._right.append((length, prompt, right))

    def _other(
        self,
        server: Server,
        model: str,
        vocab_size: int,
        length: int,
        prompt: Prompt,
        right: Answer,
    ) -> None:
        """Ask with a prompt that only ends like this one."""
        [head] = prompts_of(1, length - COMMON_TOKENS, vocab_size, ("other", length))
        other = ask(server, model, [*head, *prompt[-COMMON_TOKENS:]])
        if other.tokens == right.tokens:
            self.problems.append(f"{self.tier} other {length}: the answer is the same")

    def _whole(self, length: int) -> int:
        """Return how many tokens of a prompt lie in blocks that can be found again."""
        return (length - 1) // self._block_tokens * self._block_tokens

    def _kill(self, server: Server, model: str, length: int, prompt: Prompt, right: Answer) -> None:
        """Kill the worker while it loads, and ask again when there is another one."""
        server.reset(memory=True)
        pid = worker_of(server)
        if pid is None:
            self.problems.append(f"{self.tier} kill {length}: there is no worker")
            return
        timer = threading.Timer(KILL_AFTER_S, os.kill, (pid, signal.SIGKILL))
        timer.start()
        self.note("kill", length, ask(server, model, prompt), right)
        timer.join()
        until = time.monotonic() + 60
        while worker_of(server) in (None, pid) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(SETTLED_S)
        server.reset(memory=True)
        self.note("killed", length, ask(server, model, prompt), right)

    def expired(self, server: Server) -> None:
        """Turn the clock, and measure the arm `expired`."""
        model = served_by(server.url)
        self.offset_file.write_text(str(EXPIRED_S))
        time.sleep(SETTLED_S)
        for length, prompt, right in self._right:
            server.reset(memory=True)
            self.note("expired", length, ask(server, model, prompt), right)

    def restarted(self, server: Server) -> None:
        """Measure the arm `restart`."""
        model = served_by(server.url)
        warm = {length for length, *_ in self._right}
        for length in sorted(warm):
            [prompt] = prompts_of(1, length, 100, ("warm again", length))
            ask(server, model, prompt)
        before = {length: [*self.answers["disk", length]] for length in warm}
        for length, prompt, right in self._right:
            found = self.note("restart", length, ask(server, model, prompt), right)
            cached = before[length].pop(0).cached_tokens
            if found.cached_tokens != cached and not self.may_compute:
                self.problems.append(f"{self.tier} restart {length}: {cached} were cached before")

    def note(self, arm: str, length: int, answer: Answer, right: Answer | None) -> Answer:
        """Take in the answer of one arm, and what is wrong with it beside the right one."""
        self.answers.setdefault((arm, length), []).append(answer)
        text, gaps = "equal", self.gaps.setdefault((arm, length), [])
        if right is not None:
            text, place = difference(right.tokens, right.tops, answer.tokens, self.tie)
            if text != "equal":
                far = gap(right.tops[place], answer.tokens[place])
                gaps.append(None if math.isinf(far) else far)
        self.texts.setdefault((arm, length), []).append(text)
        name = f"{self.tier} {arm} {length}"
        click.echo(
            f"{name:<24} {answer.ttft_ms:8.1f} ms  cached {answer.cached_tokens:>6}  "
            f"from disk {answer.bytes_from_disk / 1e9:6.3f} GB  tokens {text}"
        )
        must_load = arm in DISK_ARMS and (answer.cached_tokens > 0 or not self.may_compute)
        must_hit = must_load or arm in ("device", "host")
        least = MIN_HIT * self._whole(length)
        if must_hit and answer.cached_tokens < least:
            self.problems.append(f"{name}: only {answer.cached_tokens} tokens were cached")
        if arm in MISS_ARMS and answer.cached_tokens:
            self.problems.append(f"{name}: {answer.cached_tokens} tokens were cached")
        if text == "wrong":
            self.problems.append(f"{name}: other tokens than computed")
        if must_load and answer.bytes_from_disk < 0.95 * self.kv_bytes * least:
            self.problems.append(f"{name}: only {answer.bytes_from_disk} bytes came from the disk")
        return answer

    def rows(self) -> Iterator[Row]:
        """Yield the figures of each arm and length."""
        for (arm, length), some in self.answers.items():
            all_ms = [it.ttft_ms for it in some]
            row: Row = {"tier": self.tier, "arm": arm, "prefix_tokens": length}
            row["ttft_ms"] = {"p50": statistics.median(all_ms), "min": min(all_ms), "all": all_ms}
            row["cached_tokens"] = [it.cached_tokens for it in some]
            row["bytes_from_disk"] = [it.bytes_from_disk for it in some]
            if arm in DISK_ARMS:
                loaded = [it for it in some if it.cached_tokens]
                rates = [it.bytes_from_disk / it.ttft_ms / 1e6 for it in loaded]
                row["num_loaded"] = len(loaded)
                row["GBps"] = statistics.median(rates) if rates else None
            row["tokens"] = self.texts[arm, length]
            yield row | {"gaps": self.gaps[arm, length]}


def kv_bytes_of(config: Row) -> int:
    """Return how many bytes of a token are kept for as long as its prompt, in bfloat16.

    Windows and states keep more, whose number does not grow with the prompt.
    """
    if latent := config.get("kv_lora_rank"):
        return int(2 * config["num_hidden_layers"] * (latent + config["qk_rope_head_dim"]))
    layers = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * layers.count("full_attention") * config["num_key_value_heads"] * head_dim)


@click.command(help=__doc__)
@several("--tiers", str, default="ram,fs,tieredkv", help="Tiers to measure, with commas between.")
@several("--prefix-tokens", int, default="2048,8192,32768,65536", help="Lengths of the prompts.")
@click.option("--repeats", default=3, show_default=True, help="Prompts of each length.")
@click.option("--layout", help="VLLM_KV_CACHE_LAYOUT, such as BLHNC.")
@click.option("--restart/--no-restart", default=True, help="Whether to measure that arm.")
@click.option("--faults", is_flag=True, help="Whether to measure `kill`, `killed`, `expired`.")
@click.option("--tie", default=0.5, show_default=True, help="See above.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
@with_setup
def main(
    setup: Setup,
    tiers: list[str],
    prefix_tokens: list[int],
    repeats: int,
    layout: str | None,
    restart: bool,
    faults: bool,
    tie: float,
    commit: str | None,
) -> None:
    config = setup.config
    kv_bytes = kv_bytes_of(config)
    flags = f"--max-model-len {max(prefix_tokens) + 2 * ANSWER_TOKENS}"
    environment = {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
    serving = functools.partial(setup.serving, flags=flags)
    setup.folder.mkdir(parents=True, exist_ok=True)
    rows, problems, facts = list[Row](), list[str](), dict[str, Any]()
    for tier in tiers:
        own = setup.folder / tier
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        raw_GBps = raw.disk_read_GBps(own, num_bytes=RAW_BYTES, threads=raw.BEST_THREADS)
        entry = setup.tier(tier, own)
        may_compute = tier == "tieredkv" and setup.tier_options.get("restore", "auto") == "auto"
        has_faults = tier == "tieredkv" and faults
        it = Measuring(tier, own, kv_bytes, tie, may_compute=may_compute, has_faults=has_faults)
        start, clock = perf_counter(), {CLOCK_OFFSET_VARIABLE: str(it.offset_file)}
        with serving(entry, environment=environment | clock) as server:
            click.echo(f"{tier}: started in {perf_counter() - start:.0f} s, raw {raw_GBps} GB/s")
            it.run(server, prefix_tokens, repeats, config["vocab_size"])
            facts[tier] = server.metrics()
            if has_faults and not restart:
                it.expired(server)
        if entry is not None and restart:
            with serving(entry, environment=environment | clock) as server:
                it.restarted(server)
                if has_faults:
                    it.expired(server)
        shutil.rmtree(own, ignore_errors=True)
        rows += [row | {"raw_GBps": raw_GBps} for row in it.rows()]
        problems += it.problems
    report = raw.head(commit, "python -m tests.stress.vllm_tiers") | {"layout": layout}
    click.echo(json.dumps(report | {"rows": rows, "metrics": facts, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
