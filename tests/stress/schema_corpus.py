"""Writes random answers to every JSON schema of a folder, and checks them with jsonschema.

\b
    python -m tests.stress.schema_corpus --commit "$(git rev-parse HEAD)" FOLDER

A file is a schema, a schema with instances as MaskBench has it (`schema` and `tests`), or a list of
those as JSON-Schema-Test-Suite has it. Each schema goes the way of a request's: it is checked and
rewritten, compiled in a process of its own, and then answers are written by choosing at random
among the tokens that the masks allow. The last line is JSON:

    enforced   schemas of which every keyword is enforced
    partly     those for which the log names a keyword, by that keyword
    refused    those that are a 400, by its text without names and numbers
    answers    how many were written, how many had not ended, and how many could not go on
    wrong      answers that are no JSON, or that do not follow a schema that is `enforced`
    instances  valid instances of enforced schemas, and how many of them could not be written
    compile_s  how long checking and compiling took

A schema of which a part is not enforced may have wrong answers; `loose` counts them.
"""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from jsonschema import Draft202012Validator

from tests.tieredkv.written import NotEndedError, compiler, written
from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, stop_token_ids
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.engine.grammars import Matcher
from tieredkv.errors import RequestError
from tieredkv.server.grammar_checker import GrammarChecker
from tieredkv.server.schemas import enforceable, unenforced
from tieredkv.server.structure import as_grammar, json_format
from tieredkv.types import Progress, tracked

MAX_SHOWN = 400
_NAMES_AND_NUMBERS = re.compile(r"'.*'|\d+(\.\d+)?|\[.*\]|\{.*\}|True|False|None")


class Case(NamedTuple):
    """A schema of a corpus, and instances that are valid by it."""

    name: str
    schema: Any
    instances: list[Any]


def cases_in(folder: Path) -> Iterator[Case]:
    """Yield the schemas of all JSON files in a folder; what is no JSON is left out."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.json"))
    for file in files:
        try:
            found = json.loads(file.read_text())
        except ValueError:
            continue
        groups = found if isinstance(found, list) else [found]
        for index, group in enumerate(groups):
            name = f"{file.relative_to(folder.parent)}#{index}"
            if isinstance(group, dict) and "schema" in group and "tests" in group:
                tests = [it["data"] for it in group["tests"] if it.get("valid") and "data" in it]
                yield Case(name, group["schema"], tests)
            elif isinstance(found, dict):
                yield Case(name, group, [])


def ordered(value: Any, schema: Any, whole: Any, depth: int = 0) -> Any:
    """Return an instance with its properties in the order in which they must be written."""
    if isinstance(value, list):
        parts = [_within(schema, key, whole, depth) for key in ("items", "prefixItems")]
        heads = parts[1] if isinstance(parts[1], list) else []
        inner = [*heads, *[parts[0]] * len(value)]
        return [ordered(each, part, whole, depth + 1) for each, part in zip(value, inner)]  # noqa: B905
    if not isinstance(value, dict):
        return value
    known: dict[str, Any] = {}
    for part in _combined(schema, whole, depth):
        known |= {k: v for k, v in part.get("properties", {}).items() if k not in known}
    names = [name for name in known if name in value] + [it for it in value if it not in known]
    return {it: ordered(value[it], known.get(it, {}), whole, depth + 1) for it in names}


def asserting(schema: Any) -> Any:
    """Return a schema without formats that demand nothing, beside what is more precise."""
    if isinstance(schema, list):
        return [asserting(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_idle = bool(schema.keys() & {"pattern", "enum", "const"})
    idle = {"format"} if is_idle and isinstance(schema.get("format"), str) else set[str]()
    return {key: asserting(each) for key, each in schema.items() if key not in idle}


def _within(schema: Any, key: str, whole: Any, depth: int) -> Any:
    return next((it[key] for it in _combined(schema, whole, depth) if key in it), {})


def _combined(schema: Any, whole: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that it is combined from."""
    if not isinstance(schema, dict) or depth > 40:
        return
    yield schema
    parts = [it for key in ("allOf", "anyOf", "oneOf") for it in schema.get(key, ())]
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        target = whole
        for step in filter(None, ref[1:].split("/")):
            target = target.get(step, {}) if isinstance(target, dict) else {}
        parts.append(target)
    for part in parts:
        yield from _combined(part, whole, depth + 10)


class Tried:
    """What has come of the schemas that were tried."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self.counts = Counter[str]()
        self.partly, self.refused = Counter[str](), Counter[str]()
        self.wrong: list[dict[str, Any]] = []
        self.loose: list[dict[str, Any]] = []
        self.unwritten: list[dict[str, Any]] = []
        self.took_s: list[tuple[float, str]] = []

    def try_one(self, case: Case, checker: GrammarChecker) -> None:
        """Try one schema; what it breaks is a line of the report, and no error."""
        began_at = time.perf_counter()
        try:
            grammar = as_grammar(json_format(enforceable(case.schema, "schema")))
            checker.check(grammar)
        except RequestError as error:
            self.counts["refused"] += 1
            self.refused[_NAMES_AND_NUMBERS.sub("…", str(error))[:160]] += 1
            return
        except Exception as error:  # a crash is what is looked for
            self.wrong.append({"schema": case.name, "crash": repr(error)[:MAX_SHOWN]})
            return
        self.took_s.append((time.perf_counter() - began_at, case.name))
        left = unenforced(case.schema)
        self.counts["partly" if left else "enforced"] += 1
        self.partly.update(left)
        for seed in range(self._num_answers):
            self.try_answer(case, grammar, seed, left)
        if not left:
            for instance in case.instances[:8]:
                self.try_instance(case, grammar, instance)

    def try_answer(self, case: Case, grammar: str, seed: int, left: list[str]) -> None:
        """Write one answer and check it; `left` are the keywords that it need not follow."""
        row = {"schema": case.name, "text": "", "left": left}
        try:
            text = written(grammar, random.Random(seed))
        except NotEndedError:
            self.counts["answers not ended"] += 1
            return
        except AssertionError as error:
            self.counts["answers that could not go on"] += 1
            self.wrong.append(row | {"why": str(error)[:MAX_SHOWN]})
            return
        except UnicodeDecodeError as error:
            self.wrong.append(row | {"why": repr(error)[:MAX_SHOWN]})
            return
        self.counts["answers"] += 1
        row["text"] = text[:MAX_SHOWN]
        try:
            value = json.loads(text)
        except ValueError as error:
            self.wrong.append(row | {"why": f"no JSON: {error}"})
            return
        formats = Draft202012Validator.FORMAT_CHECKER
        validator = Draft202012Validator(asserting(case.schema), format_checker=formats)
        try:
            fault = next(validator.iter_errors(value), None)
        except Exception:  # what jsonschema cannot check, such as a reference to the network
            self.counts["answers not checked"] += 1
            return
        if fault is not None:
            at = f"{fault.message[:MAX_SHOWN]} at {[*fault.absolute_schema_path]}"
            (self.loose if left else self.wrong).append(row | {"why": at})

    def try_instance(self, case: Case, grammar: str, instance: Any) -> None:
        """Find out whether a valid instance could be written."""
        given = ordered(instance, case.schema, case.schema)
        texts = [json.dumps(given, ensure_ascii=False)]
        texts += [json.dumps(given, separators=(",", ":"))]
        self.counts["instances"] += 1
        if not any(_accepts(grammar, text) for text in texts):
            self.counts["instances not writable"] += 1
            self.unwritten.append({"schema": case.name, "text": texts[0][:MAX_SHOWN]})

    def report(self) -> dict[str, Any]:
        """Return what was found, as JSON."""
        seconds = np.array([took for took, _ in self.took_s] or [0.0])
        slow = sorted(self.took_s, reverse=True)[:10]
        quantiles = {f"p{q}": round(float(np.percentile(seconds, q)), 3) for q in (50, 90, 99)}
        return {
            "counts": dict(self.counts),
            "partly": dict(self.partly.most_common()),
            "refused": dict(self.refused.most_common(60)),
            "compile_s": {**quantiles, "max": round(float(seconds.max()), 3)},
            "slowest": [{"schema": name, "s": round(took, 2)} for took, name in slow],
            "num_wrong": len(self.wrong),
            "num_loose": len(self.loose),
            "wrong": self.wrong,
        }


def _accepts(grammar: str, text: str) -> bool:
    within = Matcher(compiler().compile(grammar)).within
    try:
        return bool(within.accept_string(text) and within.is_completed())
    except RuntimeError:
        return False


def run(progress: Progress, cases: list[Case], num_answers: int, timeout_s: float) -> Tried:
    """Try all schemas with the byte tokenizer of the model `tiny-random`."""
    info = EngineInfo(
        model="tiny-random",
        max_model_len=1024,
        vocab_size=BYTE_VOCAB_SIZE,
        block_size=16,
        worker_pid=None,
        eos_token_ids=sorted(stop_token_ids()),
    )
    checker = GrammarChecker(info.model, info, timeout_s)
    tried = Tried(num_answers)
    try:
        for case in tracked(progress, "trying", cases):
            tried.try_one(case, checker)
    finally:
        checker.close()
    return tried


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--sample", default=0, help="So many schemas, chosen at random; 0 for all.")
@click.option("--seed", default=0, show_default=True, help="Of the sample.")
@click.option("--answers", default=8, show_default=True, help="Random answers to each schema.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds for one schema.")
@click.option("--details", type=click.Path(path_type=Path), help="A file for all that was found.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    folder: Path,
    sample: int,
    seed: int,
    answers: int,
    timeout: float,
    details: Path | None,
    commit: str | None,
) -> None:
    cases = [*cases_in(folder)]
    if 0 < sample < len(cases):
        cases = random.Random(seed).sample(cases, sample)
    tried = run(bench_progress(), cases, answers, timeout)
    if details is not None:
        found = {"wrong": tried.wrong, "loose": tried.loose, "unwritten": tried.unwritten}
        details.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    report = raw.head(commit, "python -m tests.stress.schema_corpus")
    report |= {"schemas": len(cases), **tried.report()}
    click.echo(json.dumps(report | {"wrong": tried.wrong[:20]}))


if __name__ == "__main__":
    main()
