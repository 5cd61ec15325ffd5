"""Shows what one request waits for, from the moment it comes until its first token.

\b
    python -m tests.stress.timeline --model random:llama-3.1-8b --prefix-tokens 2048,8192

Each prefix is computed, moved to disk, and asked for again. Of that request, the timeline tells in
milliseconds when it was planned, when blocks were asked of the disk, had arrived and were copied to
VRAM, when each step was issued and for how long that kept the engine's thread, and, on a GPU, when
the step was computed. `plan` has the block from which on a prefix is loaded, and when the first
token is expected.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.ttft import demote_all, look_up, make_prompt, serve_once, tier_sizes
from tieredkv.cache.link_rate import LinkRate
from tieredkv.config import Restore
from tieredkv.engine.llm import LLM
from tieredkv.garbage import look_seldom

Row = dict[str, Any]
TRAILING_S = 0.001
"""Events so long after the first token still belong to it: the clocks are not read at once."""


class Timeline:
    """Notes what an engine does while `recording`.

    Attributes:
        events: time in seconds since recording began, what happened, and its facts.
    """

    def __init__(self, llm: LLM) -> None:
        self._core = llm.core
        self.events: list[tuple[float, str, Row]] = []
        self._began_at = 0.0

    def _note(self, what: str, at: float | None = None, **facts: Any) -> None:
        at = time.monotonic() if at is None else at
        self.events.append((at - self._began_at, what, facts))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record from now on until the end of the context."""
        core, tiers, timer = self._core, self._core.parts.tiers, self._core._timer
        store, link, rate = tiers.store, tiers.device_link, tiers.disk_link.read_rate
        assert store is not None
        divide, launch, load = core.cache._recalls.divide, core._launch, store.load
        promote, end, timed = link.promote, LinkRate.end, list[Any]()

        def note_divide(demands: Any, planner: Any) -> Any:
            splits = divide(demands, planner)
            for split in splits:
                self._note("plan", from_block=split.block, done_ms=round(1e3 * split.done_s, 1))
            return splits

        def note_launch(scheduled: Any) -> Any:
            began_at = time.monotonic()
            launched = launch(scheduled)
            spans = [(row.start, row.context_len) for _, row in scheduled]
            issue_ms = round(1e3 * (time.monotonic() - began_at), 1)
            self._note("issue", began_at, tokens=spans, issue_ms=issue_ms)
            timed.extend(list(timer._steps)[-1:])
            return launched

        def note_end(each: LinkRate, num_bytes: int, now: float, *, teaches: bool = True) -> None:
            if each is rate:
                self._note("arrive", now, blocks=1)
            end(each, num_bytes, now, teaches=teaches)

        def counted(what: str, function: Callable[..., None]) -> Callable[..., None]:
            def note(items: Any, *args: Any, **options: Any) -> None:
                self._note(what, blocks=len(items))
                function(items, *args, **options)

            return note

        with contextlib.ExitStack() as stack:
            for where, name, function in (
                (core.cache._recalls, "divide", note_divide),
                (core, "_launch", note_launch),
                (LinkRate, "end", note_end),
                (store, "load", counted("read", load)),
                (link, "promote", counted("copy", promote)),
            ):
                stack.enter_context(mock.patch.object(where, name, function))
            first = _event()
            self.events, self._began_at = [], time.monotonic()
            yield
        if first is not None:
            torch.cuda.synchronize()
            for step in timed:
                at_s, end_s = (first.elapsed_time(it) / 1e3 for it in (step.began, step.ended))
                took_ms = round(1e3 * (end_s - at_s), 1)
                self._note("compute", self._began_at + at_s, took_ms=took_ms)

    def until(self, seconds: float) -> list[Row]:
        """Return what happened until then, in order; blocks that arrive in a row are counted."""
        rows = list[Row]()
        for at_s, what, facts in sorted(self.events, key=lambda each: each[0]):
            if at_s > seconds + TRAILING_S:
                break
            if rows and rows[-1]["event"] == what == "arrive":
                rows[-1]["blocks"] += 1
            else:
                rows.append({"ms": round(1e3 * at_s, 1), "event": what, **facts})
        return rows


def _event() -> Any:
    """Return an event that the device has just reached; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure(settings: Row, lengths: list[int], repeats: int, restore: Restore) -> list[Row]:
    """Serve each prefix from disk; return its timelines."""
    rows = list[Row]()
    with LLM(**settings, retention="24h", progress=bench_progress()) as llm:
        for index in range(2):  # rates are learnt
            llm.core.parts.tiers.settings.restore = ("compute", "load")[index]
            serve_once(llm, make_prompt(llm, max(lengths), -1))
            demote_all(llm, "disk")
        timeline = Timeline(llm)
        for repeat in range(repeats):
            for length in lengths:
                prompt = make_prompt(llm, length, repeat)
                llm.core.parts.tiers.settings.restore = "compute"
                cold_ms = serve_once(llm, prompt).ttft_ms
                demote_all(llm, "disk")
                llm.core.parts.tiers.settings.restore = restore
                with timeline.recording():
                    sample = serve_once(llm, prompt)
                row: Row = {"prefix_tokens": length, "cold_ms": round(cold_ms, 1)}
                row |= {"ttft_ms": round(sample.ttft_ms, 1), "by_tier": sample.by_tier}
                rows.append(row | {"events": timeline.until(sample.ttft_ms / 1e3)})
                llm.core.verbs.evict()
    return rows


@click.command(help=__doc__)
@click.option("--model", default="random:llama-3.1-8b", show_default=True)
@click.option("--prefix-tokens", default="2048,8192", show_default=True, help="With commas.")
@click.option("--repeats", default=2, show_default=True)
@click.option("--restore", type=click.Choice(["auto", "load"]), default="auto", show_default=True)
@click.option("--disk-dir", type=click.Path(path_type=Path), help="Where the store is made.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    model: str,
    prefix_tokens: str,
    repeats: int,
    restore: Restore,
    disk_dir: Path | None,
    commit: str | None,
) -> None:
    look_seldom()  # as the engine's process does
    lengths = [int(length) for length in prefix_tokens.split(",")]
    with tempfile.TemporaryDirectory(prefix="tieredkv-timeline-", dir=disk_dir) as folder:
        settings: Row = {"model": model, "disk_dir": folder}
        found, spec = look_up(settings)
        settings |= {"disk_dir": str(Path(folder) / "store")}
        settings |= tier_sizes(lengths, repeats, found, spec)
        rows = measure(settings, lengths, repeats, restore)
    for row in rows:
        head = "{prefix_tokens} tokens, {ttft_ms} ms, computed in {cold_ms} ms".format(**row)
        click.echo(head, err=True)
        for event in row["events"]:
            facts = {name: it for name, it in event.items() if name not in ("ms", "event")}
            what = ", ".join(f"{name} {it}" for name, it in facts.items())
            click.echo(f"{event['ms']:9.1f}  {event['event']:<8} {what}", err=True)
    report = raw.head(commit, "python -m tests.stress.timeline")
    click.echo(json.dumps(report | {"model": model, "rows": rows}))


if __name__ == "__main__":
    main()
