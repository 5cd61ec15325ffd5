"""Measures the time between tokens with and without grammars, at several sizes of batches.

    python -m tests.stress.constrained_itl --model random:llama-3.1-8b --vocabulary tekken.json

The arms take turns: no answer has a grammar (`none`), the first has one (`one`), or all have
(`all`). The grammar is a list of objects with texts, numbers and constants that goes on for as
long as the answer does. Models with drawn weights have a token for each byte and little else, so
that masks would cost nothing: `--vocabulary` names a file of a real one, such as the
tekken_240911.json of the package mistral-common with 131,072 tokens, whose texts the model's tokens
then have. `compile_ms` is how long schemas of several sizes take to compile, and `mask_us` how long
the mask of one token takes to fill, in one thread, beside nothing.
"""

import base64
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import xgrammar

from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.grammars import Compiler, Grammars, Matcher
from tieredkv.engine.llm import LLM
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.garbage import look_seldom
from tieredkv.server.schemas import enforceable
from tieredkv.server.structure import as_grammar, json_format
from tieredkv.types import tracked

Row = dict[str, Any]
ARMS = ("none", "one", "all")
NUM_SKIPPED = 4
"""Tokens of each answer that are not counted: the first ones come with the prompts."""

ITEM: Row = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "count": {"type": "integer"},
        "score": {"type": "number"},
        "done": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8},
    },
    "required": ["title", "kind", "count", "score", "done", "tags"],
    "additionalProperties": False,
}
ENDLESS: Row = {"type": "array", "items": ITEM, "minItems": 100_000}


class FileCompiler(Compiler):
    """Compiles for the token texts of a file instead of the tokenizer's."""

    def __init__(self, file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        table = json.loads(file.read_text())
        num_special = table["config"]["default_num_special_tokens"]
        texts = [b""] * num_special
        texts += [base64.b64decode(each["token_bytes"]) for each in table["vocab"]]
        self._texts = (texts + [b""] * vocab_size)[:vocab_size]
        self._vocab_size, self._eos_token_ids = vocab_size, sorted(eos_token_ids)
        self._special: dict[str, int] = {}
        info = xgrammar.TokenizerInfo(
            self._texts, vocab_size=vocab_size, stop_token_ids=self._eos_token_ids
        )
        made = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._compiler = lambda _named: made  # type: ignore[assignment]


def grammar_of(schema: Any) -> str:
    return as_grammar(json_format(enforceable(schema, "schema")))


def gaps_ms(llm: LLM, grammars: Sequence[str | None], num_tokens: int, chance: int) -> list[float]:
    """Answer a prompt for each grammar, all at once, and return the times between their tokens."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    came: dict[str, list[float]] = {}
    for i, grammar in enumerate(grammars):
        name = f"{chance}-{i}"
        came[name] = []
        prompt = [(chance * 131 + i * 17 + j * 7) % 256 for j in range(64)]
        llm.core.add_request(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, grammar=grammar)
        )
    num_open = len(came)
    while num_open:
        for output in llm.core.step():
            assert output.error is None, output.error
            came[output.request_id] += [1e3 * time.perf_counter()] * len(output.token_ids)
            num_open -= output.finish_reason is not None
        llm.core.wait(0.05)
    assert all(len(times) == num_tokens for times in came.values()), "an answer has ended early"
    return [
        after - before
        for times in came.values()
        for before, after in itertools.pairwise(times[NUM_SKIPPED:])
    ]


def measure(
    llm: LLM, sizes: Sequence[int], arms: Sequence[str], num_tokens: int, repeats: int
) -> list[Row]:
    """Measure the gaps of all arms at all sizes, in turns; the arms in the given order."""
    grammar = grammar_of(ENDLESS)
    num_of: dict[str, Callable[[int], int]] = {"none": lambda _: 0, "one": lambda _: 1}
    num_of["all"] = lambda size: size
    gaps: dict[tuple[int, str], list[float]] = {}
    turns = list(itertools.product(range(-1, repeats), sizes, arms))  # the first is not counted
    progress = bench_progress()
    for index, (repeat, size, arm) in enumerate(tracked(progress, "answering", turns)):
        num_constrained = num_of[arm](size)
        asked = [grammar] * num_constrained + [None] * (size - num_constrained)
        times = gaps_ms(llm, asked, num_tokens, index)
        if repeat >= 0:
            gaps.setdefault((size, arm), []).extend(times)
    rows = []
    for (size, arm), times in gaps.items():
        p50, p99 = statistics.median(times), float(np.quantile(times, 0.99))
        free = statistics.median(gaps[size, "none"])
        row = {"batch": size, "arm": arm, "itl_ms": {"p50": p50, "p99": p99}}
        rows.append({**row, "over_none": p50 / free, "num_gaps": len(times)})
    return rows


def measure_grammars(compiler: Compiler) -> Row:
    """Measure how long compiling takes, by the number of properties, and filling masks."""
    compile_ms = {}
    for count in (1, 10, 100, 300):
        properties = {f"p{i}": ITEM for i in range(count)}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        grammar = grammar_of({**schema, "additionalProperties": False})
        began_at = time.perf_counter()
        compiler.compile(grammar)
        compile_ms[count] = 1e3 * (time.perf_counter() - began_at)
    matcher = Matcher(compiler.compile(grammar_of(ENDLESS)))
    mask = xgrammar.allocate_token_bitmask(1, compiler._vocab_size)
    times = []
    text = b'[{"title": "A text of some words", "kind": "beta", "count": 12, "score": 0.5, "done": '
    for byte in text:
        began_at = time.perf_counter()
        matcher.within.fill_next_token_bitmask(mask)
        times.append(1e6 * (time.perf_counter() - began_at))
        assert matcher.within.accept_string(bytes([byte]))
    return {
        "compile_ms": compile_ms,
        "mask_us": {"p50": statistics.median(times), "max": max(times)},
    }


@click.command(help=__doc__)
@click.option("--model", default="random:llama-3.1-8b", show_default=True)
@click.option("--vocabulary", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--batches", default="1,64", show_default=True, help="With commas.")
@click.option("--order", default=",".join(ARMS), show_default=True, help="Of the arms.")
@click.option("--tokens", default=128, show_default=True, help="Of each answer.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--device-size", default="8GiB", show_default=True)
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    model: str,
    vocabulary: Path | None,
    batches: str,
    order: str,
    tokens: int,
    repeats: int,
    device_size: str,
    commit: str | None,
) -> None:
    look_seldom()  # as the engine's process does
    sizes, arms = [int(size) for size in batches.split(",")], order.split(",")
    if sorted(arms) != sorted(ARMS):
        raise click.BadParameter(
            f"it has all of {', '.join(ARMS)}, with commas", param_hint="--order"
        )
    with LLM(model, device_size=device_size, progress=bench_progress()) as llm:
        core = llm.core
        compiler = core._make_compiler()
        if vocabulary is not None:
            told = core.model.vocab_size, sorted(core.model.eos_token_ids)
            compiler = FileCompiler(vocabulary, *told)
        core._grammars = Grammars(lambda: compiler, core.wake)
        rows = measure(llm, sizes, arms, tokens, repeats)
        core._grammars.close()
    report = raw.head(commit, "python -m tests.stress.constrained_itl")
    report |= {"model": model, "vocabulary": vocabulary.name if vocabulary else None}
    click.echo(json.dumps(report | {"rows": rows, **measure_grammars(compiler)}))


if __name__ == "__main__":
    main()
