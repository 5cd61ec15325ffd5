"""Makes the tokenization of a model from the settings."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from tieredkv.config import Settings
from tieredkv.errors import ConfigError
from tieredkv.server.chat import Tokenization
from tieredkv.server.chat_template import RESERVED
from tieredkv.server.message_parser import Family, choose
from tieredkv.server.template_clock import clock_of


def make_tokenization(
    tokenizer: PreTrainedTokenizerBase, settings: Settings, max_model_len: int
) -> Tokenization:
    """Return the tokenization of a model.

    Args:
        tokenizer: of the model.
        settings: how conversations are rendered and answers are read.
        max_model_len: the longest prompt in tokens.

    Raises:
        ConfigError: a setting names an unknown family, or a parameter of the tokenizer.
    """
    own = getattr(tokenizer, "response_template", None)
    return Tokenization(
        tokenizer,
        family=family_of(settings, str(tokenizer.chat_template or ""), own),
        has_canonical_tools=settings.canonical_tools == "on",
        allows_special=settings.allow_special_in_content == "on",
        max_model_len=max_model_len,
        template_arguments=template_arguments(settings),
        clock=clock_of(settings),
    )


def template_arguments(settings: Settings) -> dict[str, Any]:
    """Return the settings' arguments for the chat template.

    Raises:
        ConfigError: one of them has the name of a parameter of the tokenizer.
    """
    arguments: dict[str, Any] = json.loads(settings.chat_template_kwargs)
    if reserved := sorted(arguments.keys() & RESERVED):
        raise ConfigError(f"`chat_template_kwargs` may not set `{reserved[0]}`")
    return arguments


def family_of(
    settings: Settings, chat_template: str, response_template: Any = None
) -> Family | None:
    """Return how a model writes messages, by the settings and the templates it came with."""
    named = {"tool_parser": settings.tool_parser, "reasoning_parser": settings.reasoning_parser}
    return choose(chat_template, response_template, **named)
