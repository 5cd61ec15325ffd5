"""The run over a corpus counts what becomes of each schema, and finds what is wrong."""

import json
from pathlib import Path

from click.testing import CliRunner

from tests.stress import schema_corpus
from tieredkv.server.structure import as_grammar, json_format

NAMED = {"type": "object", "properties": {"b": {"const": 1}, "a": {"type": "null"}}}


def test_each_schema_is_counted_once(tmp_path: Path) -> None:
    suite = [{"schema": {"enum": [1, 2]}, "tests": [{"data": 1, "valid": True}]}]
    bench = {"schema": NAMED, "tests": [{"data": {"a": None, "b": 1}, "valid": True}]}
    files = {"suite": suite, "bench": bench, "plain": {"not": {}}, "bad": {"type": "banana"}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "none.json").write_text("no JSON")
    details = tmp_path / "details.txt"
    options = [str(tmp_path), "--answers", "3", "--details", str(details)]
    result = CliRunner().invoke(schema_corpus.main, options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    counts = report["counts"]
    assert [counts[key] for key in ("enforced", "partly", "refused")] == [2, 1, 1]
    assert counts["instances"] == 2 and "instances not writable" not in counts
    assert report["partly"] == {"not": 1} and report["num_wrong"] == 0
    assert json.loads(details.read_text())["wrong"] == []


def test_an_answer_that_does_not_follow_its_schema_is_found() -> None:
    tried = schema_corpus.Tried(num_answers=1)
    grammar = as_grammar(json_format({"type": "integer"}))
    case = schema_corpus.Case("a", {"type": "string"}, [])
    tried.try_answer(case, grammar, 0, [])
    tried.try_answer(case, grammar, 0, ["not"])
    tried.try_instance(case, grammar, "text")
    assert ["is not of type 'string'" in row["why"] for row in tried.wrong] == [True]
    assert len(tried.loose) == 1 and tried.unwritten == [{"schema": "a", "text": '"text"'}]
