"""Measures how long schemas of several kinds and sizes take until they can be used.

\b
    python -m tests.stress.grammar_compile --vocabulary tekken.json

Each is checked, rewritten and sent to the process that compiles it and tries it, as a request's
first schema is. `--vocabulary` names a file of a real vocabulary, such as tekken_240911.json of the
package mistral-common with 131,072 tokens; without it, one of as many drawn syllables is made. The
last line is JSON: for each kind and size `bytes`, the schema's length; `first_s`, the time of the
first schema that a process compiles; `s`, the median of the next ones, which differ from it in one
constant; and `fault`, why it was refused, or an empty text.
"""

import base64
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.stress.hostile_bodies import big_tokenizer
from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import RequestError
from tieredkv.server.grammar_checker import GrammarChecker
from tieredkv.server.schemas import enforceable
from tieredkv.server.structure import as_grammar, json_format
from tieredkv.types import Progress, tracked

Row = dict[str, Any]
VOCAB_SIZE = 131_072
END = "<|end|>"
ITEM: Row = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "n": {"type": "number"},
    },
    "required": ["title", "kind", "n"],
    "additionalProperties": False,
}


def of_properties(schemas: Sequence[Row], *, is_required: bool = True) -> Row:
    properties = {f"property_{i}": each for i, each in enumerate(schemas)}
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return closed | ({"required": [*properties]} if is_required else {})


def nested(depth: int) -> Row:
    schema: Row = {"type": "string"}
    for _ in range(depth):
        schema = of_properties([{"type": "integer"}, schema])
    return schema


def string(**bounds: Any) -> Row:
    return {"type": "string", **bounds}


def same(schema: Row) -> Callable[[int], Row]:
    return lambda size: of_properties([schema] * size)


CASES: dict[str, tuple[tuple[int, ...], Callable[[int], Row]]] = {
    "properties": ((10, 100, 300, 1000), same(string())),
    "optional properties": (
        (10, 100, 300, 1000),
        lambda size: of_properties([string()] * size, is_required=False),
    ),
    "objects of three properties": ((10, 100, 300), same(ITEM)),
    "levels of objects": ((1, 4, 16, 30), nested),
    "values of an enum": ((10, 100, 1000, 10_000), lambda n: {"enum": [f"v{i}" for i in range(n)]}),
    "branches of anyOf": (
        (4, 16, 64),
        lambda n: {"anyOf": [of_properties([ITEM, {"const": i}]) for i in range(n)]},
    ),
    "elements of a pattern": ((10, 100, 1000), lambda n: string(pattern=f"^{'[a-z]x?' * n}$")),
    "repetitions in a pattern": ((10, 100, 1000), lambda n: string(pattern=f"^[a-z]{{1,{n}}}$")),
    "maxLength of a string": ((10, 100, 1000, 10_000), lambda n: string(maxLength=n)),
    "strings of one maxLength": ((1, 10, 100), same(string(maxLength=200))),
    "strings of different maxLength": (
        (1, 3, 10),
        lambda size: of_properties([string(maxLength=40 * i) for i in range(1, 1 + size)]),
    ),
    "maxItems of a list": ((10, 1000, 100_000), lambda n: {"items": ITEM, "maxItems": n}),
}


def tokenizer_of(file: Path | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the texts of a file; it is never asked to split a text."""
    if file is None:
        return big_tokenizer(VOCAB_SIZE)
    names = bytes_to_unicode()  # type: ignore[no-untyped-call]
    table = json.loads(file.read_text())["vocab"][: VOCAB_SIZE - 1]
    texts = ["".join(names[it] for it in base64.b64decode(row["token_bytes"])) for row in table]
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=made, eos_token=END)
    return tokenizer


def run(
    progress: Progress, start: Callable[[], GrammarChecker], repeats: int, only: str = ""
) -> list[Row]:
    """Measure each case that has this in its name, each in a process of its own."""
    rows = []
    sizes = [(name, size) for name, (sizes, _) in CASES.items() for size in sizes if only in name]
    for name, size in tracked(progress, "compiling", sizes):
        schema = CASES[name][1](size)
        checker = start()
        try:
            took = [_seconds(checker, {"const": 0})]  # starts the process
            took = [_seconds(checker, _renamed(schema, name, i)) for i in range(1 + repeats)]
            fault = ""
        except RequestError as error:
            fault = str(error)
        finally:
            checker.close()
        row = {"case": name, "size": size, "bytes": len(json.dumps(schema)), "fault": fault}
        if not fault:
            row |= {"first_s": round(took[0], 3), "s": round(statistics.median(took[1:]), 3)}
        rows.append(row)
    return rows


def _renamed(schema: Row, name: str, repeat: int) -> Row:
    return of_properties([{"const": f"{name} {repeat}"}, schema])


def _seconds(checker: GrammarChecker, schema: Row) -> float:
    began_at = time.perf_counter()
    checker.check(as_grammar(json_format(enforceable(schema, "schema"))))
    return time.perf_counter() - began_at


@click.command(help=__doc__)
@click.option("--vocabulary", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--repeats", default=3, show_default=True, help="After the first one.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds for one schema.")
@click.option("--only", default="", help="Part of the name of the cases to be measured.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    vocabulary: Path | None, repeats: int, timeout: float, only: str, commit: str | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(vocabulary)
        tokenizer.save_pretrained(folder)
        end = tokenizer.eos_token_id
        info = EngineInfo(
            model=folder,
            max_model_len=1024,
            vocab_size=len(tokenizer),
            block_size=16,
            worker_pid=None,
            eos_token_ids=[end],
        )
        rows = run(bench_progress(), lambda: GrammarChecker(folder, info, timeout), repeats, only)
    report = raw.head(commit, "python -m tests.stress.grammar_compile")
    told = {"vocabulary": vocabulary.name if vocabulary else None, "vocab_size": info.vocab_size}
    click.echo(json.dumps(report | told | {"timeout_s": timeout, "rows": rows}))


if __name__ == "__main__":
    main()
