"""The texts that users read, in one file: `tests/golden.json`.

A test asserts the type of an error and its fields, such as `param` and `code`. What the error says
is compared with the file, under the name of the test. A text is changed there and nowhere else:
`pytest --write-messages TESTS` writes the texts of these tests anew, and the diff shows what users
will read.
"""

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

FILE = Path(__file__).with_suffix(".json")
PLACES = re.compile(re.escape(tempfile.gettempdir()) + r"/[^\s`'\",:]*")

Error = TypeVar("Error", bound=BaseException)

is_writing = False
"""Whether texts are kept instead of compared; `tests/conftest.py` sets it."""

_known: dict[str, list[str]] = {}
_num_told: Counter[str] = Counter()


@contextmanager
def refused(
    kind: type[Error], *, hide: Mapping[str, str] | None = None, **fields: object
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error of a type with these fields, whose text is the one in the file.

    Args:
        kind: the type, or one that it derives from.
        hide: texts that differ from run to run, and what stands for them in the file.
        fields: attributes of the error and their values.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert {name: getattr(caught.value, name) for name in fields} == fields
    told(str(caught.value), hide=hide)


def told(text: str, *, hide: Mapping[str, str] | None = None) -> None:
    """Compare a text with the one in the file, of as many as this test compares in this order."""
    for one, name in (hide or {}).items():
        text = text.replace(one, name)
    text = PLACES.sub("PLACE", text)
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    number, messages = _num_told[test], messages_of(test)
    _num_told[test] += 1
    if is_writing:
        messages[number:] = [text]
        return
    assert number < len(messages), f"no text for this test: run `pytest --write-messages {test}`"
    assert text == messages[number]


def messages_of(test: str) -> list[str]:
    """Return the texts of a test, in the order in which it compares them."""
    if not _known:
        _known.update(json.loads(FILE.read_text()))
    return _known.setdefault(test, [])


def write() -> None:
    """Write the file anew, with the texts of the tests that ran and of those that did not."""
    kept = {test: _known[test] for test in sorted(_known) if _known[test]}
    FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
