"""Check that a model can take a prompt, and pack the prompt's tokens.

The server's process checks prompts too, so this module does not import torch.
"""

import contextlib
from array import array
from collections.abc import Sequence

import numpy as np

from tieredkv.errors import PromptTooLongError, RequestError


def too_long(
    field: str, num_tokens: int | None, max_model_len: int, *, has_answer: bool = False
) -> PromptTooLongError:
    """Return the error for a prompt that does not fit the context.

    Args:
        field: what the prompt is called.
        num_tokens: length of the prompt; None if it is only known to be too long.
        max_model_len: the longest prompt and answer together.
        has_answer: whether the answer needs room too.
    """
    got = f"more than {max_model_len}" if num_tokens is None else num_tokens
    needed = " and at least one must be generated" if has_answer else ""
    text = (
        f"This model's maximum context length is {max_model_len} tokens. However, your "
        f"{field} resulted in {got} tokens{needed}. Please reduce the length of the {field}."
    )
    error = PromptTooLongError(text, param=field, code="context_length_exceeded")
    if num_tokens is not None:
        # A prompt that fills the context is too long only because its answer needs a token.
        error.num_tokens, error.most_tokens = num_tokens, min(max_model_len, num_tokens - 1)
    return error


def pack_prompt(
    token_ids: Sequence[int],
    max_model_len: int,
    vocab_size: int,
    *,
    max_tokens: int = 1,
    field: str = "prompt",
) -> "array[int]":
    """Return a prompt that can be served, packed as it is hashed.

    Args:
        token_ids: the prompt.
        max_model_len: the longest prompt and answer together.
        vocab_size: the model's vocabulary size.
        max_tokens: the answer's most tokens; unless 0, there must be room for one.
        field: what the prompt is called.

    Raises:
        RequestError: it is empty, leaves no room for an answer, or has an unknown token.
    """
    text, code, packed = "", "invalid_value", array("I")
    if not token_ids:
        text = f"Invalid '{field}': the prompt is empty. At least one token is needed."
    elif len(token_ids) + min(max_tokens, 1) > max_model_len:
        raise too_long(field, len(token_ids), max_model_len, has_answer=max_tokens > 0)
    else:
        with contextlib.suppress(OverflowError):  # an id is negative, or far too large
            packed = array("I", token_ids)
        if not packed or np.frombuffer(packed, dtype=np.uint32).max() >= vocab_size:
            unknown = next(each for each in token_ids if not 0 <= each < vocab_size)
            vocabulary = f"the model's vocabulary of {vocab_size} tokens"
            text = f"Invalid '{field}': token id {unknown} is not in {vocabulary}."
    if text:
        raise RequestError(text, param=field, code=code)
    return packed
