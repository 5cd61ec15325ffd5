"""The file of texts is in order, and a text that changed is seen."""

import json
import os
from collections import Counter
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
    for name, empty in (("_known", {}), ("_kept", {}), ("_num_told", Counter[str]())):
        monkeypatch.setattr(golden, name, empty)
    monkeypatch.setattr(golden, "is_writing", False)
    yield file


def keep(*cases: str) -> dict[str, list[str]]:
    """Keep a text for each case of this test, as `--write-messages` does; return the file's."""
    test = golden.function_of(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "is_writing", True)
        for number, text in enumerate(cases):
            patch.setenv("PYTEST_CURRENT_TEST", f"{test}[{number}] (call)")
            told(text)
    golden.write()
    known: dict[str, list[str]] = json.loads(golden.FILE.read_text())
    return {key.removeprefix(test): texts for key, texts in known.items()}


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
    assert keep("It is so.") == {"": ["It is so."]}
    golden._known.clear()
    golden._num_told.clear()
    told("It is so.")
    golden._num_told.clear()
    with pytest.raises(AssertionError):
        told("It is otherwise.")


def test_cases_with_the_same_text_share_it(file: Path) -> None:
    assert keep("no", "no") == {"": ["no"]}
    golden._kept.clear()
    assert keep("no", "never") == {"[0]": ["no"], "[1]": ["never"]}


def test_what_differs_from_run_to_run_is_hidden(file: Path, tmp_path: Path) -> None:
    keep("`PLACE` is used by PID")
    told(f"`{tmp_path}/store` is used by 4711", hide={"4711": "PID"})


def test_the_fields_of_an_error_are_compared_too(file: Path) -> None:
    keep("no")
    with refused(RequestError, param="model", status=404):
        raise RequestError("no", param="model", status=404)
    with pytest.raises(AssertionError), refused(RequestError, param="model"):
        raise RequestError("no", param="input")


@pytest.mark.parametrize("told_of", ["it broke.\n at line 3", "it broke", "it broke. at line 3"])
def test_what_a_library_says_in_whole_or_at_first_is_not_compared(file: Path, told_of: str) -> None:
    keep("cannot be read: CAUSE")
    with refused(RequestError):
        raise RequestError(f"cannot be read: {told_of}") from ValueError("it broke.\n at line 3")
