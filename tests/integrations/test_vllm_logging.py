"""Whether messages of tieredkv are seen inside vLLM."""

import logging
from collections.abc import Iterator

import pytest

from tieredkv.integrations import vllm_logging
from tieredkv.integrations.vllm_logging import join_log


class Kept(logging.Handler):
    """Keeps the texts of messages."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Yield stand-ins for our logger and for vLLM's, below one that tells errors only."""
    root = logging.getLogger("stands for the root")
    root.setLevel(logging.ERROR)
    ours, theirs = root.getChild("ours"), root.getChild("theirs")
    monkeypatch.setattr(vllm_logging, "OURS", ours.name)
    monkeypatch.setattr(vllm_logging, "THEIRS", theirs.name)
    yield ours, theirs
    for each in (ours, theirs):
        each.handlers.clear()
        each.setLevel(logging.NOTSET)
        each.propagate = True


Loggers = tuple[logging.Logger, logging.Logger]


def test_messages_go_where_those_of_vllm_go_once(loggers: Loggers) -> None:
    ours, theirs = loggers
    kept = Kept(logging.INFO)
    theirs.addHandler(kept)
    theirs.setLevel(logging.DEBUG)
    for _ in range(2):
        join_log()
    ours.getChild("deep").info("told")
    ours.getChild("deep").debug("not told")
    assert kept.texts == ["told"]
    assert not ours.isEnabledFor(logging.DEBUG), "nobody would see it"


def test_a_logger_that_somebody_has_configured_stays_as_it_is(loggers: Loggers) -> None:
    ours, theirs = loggers
    theirs.addHandler(Kept(logging.INFO))
    ours.setLevel(logging.ERROR)
    join_log()
    assert not ours.handlers and ours.level == logging.ERROR and ours.propagate


def test_where_vllm_configures_no_log_nothing_changes(loggers: Loggers) -> None:
    ours, _ = loggers
    join_log()
    assert not ours.handlers and not ours.level and ours.propagate
