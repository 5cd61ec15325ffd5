"""What several tests of the server need."""

from collections.abc import Iterator

import pytest

from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.server.chat import Tokenization


@pytest.fixture(scope="module")
def tokenization() -> Iterator[Tokenization]:
    """The small model's tokenizer, as the server uses it."""
    tokenization = Tokenization(load_tokenizer("tiny-random"))
    yield tokenization
    tokenization.close()
