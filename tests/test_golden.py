"""The file of texts is in order, and a text that changed is seen."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import golden
from tests.golden import refused, told
from tieredkv.errors import RequestError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a file of texts of this test's own."""
    file = tmp_path / "messages.json"
    file.write_text("{}")
    monkeypatch.setattr(golden, "FILE", file)
    monkeypatch.setattr(golden, "is_writing", False)
    monkeypatch.setattr(golden, "_known", {})
    yield file


def keep(text: str) -> None:
    """Keep a text for the test that runs, as `--write-messages` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "is_writing", True)
        told(text)
    golden.write()
    golden._num_told.clear()


def test_every_text_belongs_to_a_test_that_is_there() -> None:
    known: dict[str, list[str]] = json.loads((ROOT / "tests/golden.json").read_text())
    assert [*known] == sorted(known)
    for test, texts in known.items():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test
        assert texts and all(texts), test


def test_a_text_that_is_unknown_or_has_changed_fails(file: Path) -> None:
    with pytest.raises(AssertionError, match="run `pytest --write-messages "):
        told("It is so.")
    keep("It is so.")
    told("It is so.")
    golden._num_told.clear()
    with pytest.raises(AssertionError):
        told("It is otherwise.")


def test_what_differs_from_run_to_run_is_hidden(file: Path, tmp_path: Path) -> None:
    keep("`PLACE` is used by PID")
    told(f"`{tmp_path}/store` is used by 4711", hide={"4711": "PID"})


def test_the_fields_of_an_error_are_compared_too(file: Path) -> None:
    keep("no")
    with refused(RequestError, param="model", status=404):
        raise RequestError("no", param="model", status=404)
    with pytest.raises(AssertionError), refused(RequestError, param="model"):
        raise RequestError("no", param="input")
