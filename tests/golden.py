"""The texts that users read, in one file: `tests/golden.json`.

A test asserts the type of an error and its fields, such as `param` and `code`. What the error says
is compared with the file, under the name of the test. A text is changed there and nowhere else:
`pytest --write-messages TESTS` writes the texts of these tests anew, and the diff shows what users
will read.
"""

import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tieredkv.errors import TieredKVError

FILE = Path(__file__).with_suffix(".json")
PLACES = re.compile(re.escape(tempfile.gettempdir()) + r"/[^\s`'\",:]*")

Error = TypeVar("Error", bound=BaseException)

is_writing = False
"""Whether texts are kept instead of compared; `tests/conftest.py` sets it."""

_known: dict[str, list[str]] = {}
_kept: dict[str, list[str]] = {}
_num_told: Counter[str] = Counter()
_LONGEST = 400


@contextmanager
def refused(
    kind: type[Error], *, hide: Mapping[str, str] | None = None, **fields: object
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error of a type with these fields, whose text is the one in the file.

    What a library or the system says as the cause of the error is not compared, since its next
    version may say it in other words.

    Args:
        kind: the type, or one that it derives from.
        hide: texts that differ from run to run, and what stands for them in the file.
        fields: attributes of the error and their values.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert {name: getattr(caught.value, name) for name in fields} == fields
    told(_text_of(caught.value), hide={**(hide or {}), **_cause_of(caught.value)})


def _cause_of(error: BaseException) -> dict[str, str]:
    cause = error.__cause__
    is_foreign = cause is not None and not isinstance(cause, TieredKVError)
    text = str(cause) if is_foreign else ""
    lines = [line.strip() for line in text.splitlines()]
    shorter = (" ".join(lines).strip(". "), *(line.strip(".") for line in lines[:1]))
    return dict.fromkeys(filter(None, (text, *shorter)), "CAUSE")


def _text_of(error: BaseException) -> str:
    """Return what an error says; a client's has the server's words in its body."""
    body = getattr(error, "body", None)
    body = body.get("error", body) if isinstance(body, dict) else {}
    return str(body.get("message", error) if isinstance(body, dict) else error)


def warnings_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """Return what a logger has said to operators: its warnings and errors, the first one first."""
    records = [it for it in caplog.records if it.name == logger and it.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


def told(text: str, *, hide: Mapping[str, str] | None = None) -> None:
    """Compare a text with the one in the file, of as many as this test compares in this order."""
    for one, name in (hide or {}).items():
        text = text.replace(one, name)
    text = PLACES.sub("PLACE", text)
    if len(text) > _LONGEST:
        text = f"{text[:200]}... {len(text)} characters ...{text[-100:]}"
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    if is_writing:
        _kept.setdefault(test, []).append(text)
        return
    texts, number = texts_of(test), _num_told[test]
    _num_told[test] += 1
    what = f"no text for this test: run `pytest --write-messages {function_of(test)}`"
    assert number < len(texts), what
    assert text == texts[number]


def function_of(test: str) -> str:
    """Return the name of a test without the case."""
    return test.partition("[")[0]


def texts_of(test: str) -> list[str]:
    """Return the texts of a test; those of its function if all cases have the same."""
    if not _known:
        _known.update(json.loads(FILE.read_text()))
    return _known.get(test) or _known.get(function_of(test), [])


def write() -> None:
    """Write the file anew: the texts of the functions that ran, and of all others as they were."""
    functions = {*map(function_of, _kept)}
    known = json.loads(FILE.read_text())
    known = {test: texts for test, texts in known.items() if function_of(test) not in functions}
    for function in functions:
        cases = {test: texts for test, texts in _kept.items() if function_of(test) == function}
        is_same = len({*map(tuple, cases.values())}) == 1
        known |= {function: next(iter(cases.values()))} if is_same else cases
    ordered = {test: known[test] for test in sorted(known)}
    FILE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
