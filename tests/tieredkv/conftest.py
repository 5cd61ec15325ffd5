"""Fixtures that several tests of the server use."""

import pytest

from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.server.chat import Tokenization


@pytest.fixture(scope="module")
def tokenization() -> Tokenization:
    """Return the small model's tokenizer, as the server uses it."""
    return Tokenization(load_tokenizer("tiny-random"))
