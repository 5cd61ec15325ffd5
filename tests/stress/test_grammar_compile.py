"""The measurement of compile times has every kind of schema, each size once."""

import pytest

from tests.stress import grammar_compile
from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, stop_token_ids
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.server.grammar_checker import GrammarChecker
from tieredkv.types import ignore_progress


def test_a_case_is_measured_at_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    info = EngineInfo(
        model="tiny-random",
        max_model_len=1024,
        vocab_size=BYTE_VOCAB_SIZE,
        block_size=16,
        worker_pid=None,
        eos_token_ids=sorted(stop_token_ids()),
    )
    small = {name: (sizes[:1], make) for name, (sizes, make) in grammar_compile.CASES.items()}
    monkeypatch.setattr(grammar_compile, "CASES", small)
    rows = grammar_compile.run(
        ignore_progress, lambda: GrammarChecker(info.model, info, 30.0), 1, "pattern"
    )
    names = [name for name in small if "pattern" in name]
    assert [(row["case"], row["size"]) for row in rows] == [(it, small[it][0][0]) for it in names]
    assert len(names) > 1 and not any(row["fault"] for row in rows)
    assert all(row["s"] > 0 and row["first_s"] > 0 and row["bytes"] > 0 for row in rows)


def test_a_schema_that_is_refused_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    info = EngineInfo(
        model="tiny-random", max_model_len=1024, vocab_size=0, block_size=16, worker_pid=None
    )
    monkeypatch.setattr(grammar_compile, "CASES", {"none": ((1,), lambda _: {"enum": []})})
    [row] = grammar_compile.run(ignore_progress, lambda: GrammarChecker("x", info, 1.0), 1)
    assert row["fault"] and "s" not in row
