"""Texts and messages to token ids, and token ids to text; what is long, off the event loop.

It knows the tokenizer and its chat template, no HTTP.
"""

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.errors import RequestError
from tieredkv.server.diagnosis import Part, parts_of
from tieredkv.server.pieces import PieceEncoder

NUM_THREADS = 4
SHORT_CHARACTERS = 4096
"""Work on fewer is done at once: it takes about as long as a thread's answer would."""

CACHED_TOKENS = 65_536

Prompt = str | list[int]
TOOLS = -1
SIGNS = range(0xF0000, 0xFFFFE)
"""Characters for private use, which stand at the marks of a text while these are looked for."""

MAX_RENDERINGS = 100
"""So many marks at most are looked for by rendering once more for each of them."""

_FAULTS = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What templates raise where a message or tool is not as they take for granted."""

_ANY_SIGN = re.compile(f"[{chr(SIGNS[0])}-{chr(SIGNS[-1])}]")

Mark = tuple[int, int]
"""The end of a part of a message, by their indexes, or of a tool, by `TOOLS` and its index."""

Messages = Sequence[Mapping[str, Any]]
"""What chat templates know, but for `content`, which is a list of texts: its parts."""

_BYTE_OF = {each: byte for byte, each in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
"""What vocabularies of bytes write for each of them."""

Arguments = Mapping[str, Any]
Result = TypeVar("Result")


class Token(NamedTuple):
    """What one token says: its text by itself, and its bytes, which may be part of a character."""

    text: str
    encoded: bytes

    @property
    def label(self) -> str:
        """Its text or, where it has none by itself, its bytes, as OpenAI writes them."""
        if self.text.encode() == self.encoded:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.encoded)


class Encoded(NamedTuple):
    """The token ids of a conversation, and how many of them lie before each mark.

    Attributes:
        parts: what it was made of.
    """

    token_ids: list[int]
    ends: list[int]
    parts: Sequence[Part] = ()


class Tokenization:
    """One checkpoint's tokenizer, used by the event loop and its threads.

    `encode` of a fast tokenizer leaves the interpreter lock to others, so a long prompt does not
    hold up the streams of other requests.

    Args:
        has_canonical_tools: tools are rendered with their keys sorted.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, has_canonical_tools: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self._has_canonical_tools = has_canonical_tools
        self._encoder = PieceEncoder(tokenizer)
        self._namespace: object = ""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.token = functools.lru_cache(CACHED_TOKENS)(self._decode_one)

    def of(self, namespace: object) -> "Tokenization":
        """Return the same, for texts that no other namespace may notice."""
        made = copy.copy(self)
        made._namespace = namespace
        return made

    async def encode_prompts(self, prompts: Sequence[Prompt], **how: bool) -> list[list[int]]:
        """Return the token ids of prompts; those that are token ids stay as they are."""
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self.run(size, lambda: [self._encode(prompt, how) for prompt in prompts])

    async def encode_chat(
        self, messages: Messages, arguments: Arguments, marks: Sequence[Mark] = ()
    ) -> Encoded:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        A mark whose place in the text cannot be told, as the template moves or drops what is
        there, is at the end of its message, or else at 0.

        Raises:
            RequestError: there is no chat template, or it refuses these messages.
        """
        if not self.tokenizer.chat_template:
            why = "This model has no chat template, so it cannot answer chat requests."
            text = f"{why} Use /v1/completions instead."
            raise RequestError(text, param="messages", code="chat_template_missing")

        def encode() -> Encoded:
            text = self._render(messages, arguments)
            places = self._places(text, messages, arguments, marks)
            # The template has written the special tokens, the first one included.
            token_ids, ends = self._encoder.encode(text, places, self._namespace)
            tools = self._printed(arguments).get("tools") or ()
            return Encoded(token_ids, ends, parts_of(tools, _joined(messages)))

        is_plain = not (marks or arguments.get("tools"))
        size = sum(len(part) for each in messages for part in each["content"])
        return await self.run(size if is_plain else SHORT_CHARACTERS, encode)

    async def decode(self, prompt: Prompt) -> str:
        """Return the text of a prompt, which may have come as token ids."""
        if isinstance(prompt, str):
            return prompt
        return await self.run(len(prompt), lambda: str(self.tokenizer.decode(prompt)))

    async def starts(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return where each token begins in their text; all bytes of a character begin with it."""

        def find() -> list[int]:
            detokenizer = Detokenizer(self.tokenizer, shows_special=True)
            lengths = [len(detokenizer.feed([token_id])) for token_id in token_ids]
            detokenizer.finish()
            # What the tokenizer put before a text is not in it.
            num_added = len(detokenizer.text) - len(text)
            starts = itertools.accumulate([-num_added, *lengths])
            return [max(0, start) for start in starts][: len(token_ids)]

        return await self.run(len(token_ids), find)

    def close(self) -> None:
        """End the threads; what they are doing is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Do work on so many characters or tokens, in a thread if they are many."""
        if size < SHORT_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, prompt: Prompt, how: Mapping[str, bool]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        # Not a warning's matter: what does not fit the context is refused by the caller.
        return list(self.tokenizer.encode(prompt, verbose=False, **how))

    def _places(
        self, text: str, messages: Messages, arguments: Arguments, marks: Sequence[Mark]
    ) -> list[int]:
        """Return where each mark is in a rendered text."""
        found: dict[Mark, int] = {}
        with contextlib.suppress(RequestError):
            found = self._places_of_signs(text, messages, arguments, marks)
        places = dict.fromkeys(marks, 0) | found
        for mark in [mark for mark in marks if mark not in found][-MAX_RENDERINGS:]:
            find = self._end_of_tool if mark[0] == TOOLS else self._end_of_message
            with contextlib.suppress(RequestError):
                places[mark] = find(text, messages, arguments, mark)
        return [places[mark] for mark in marks]

    def _places_of_signs(
        self, text: str, messages: Messages, arguments: Arguments, marks: Sequence[Mark]
    ) -> dict[Mark, int]:
        """Return where marks are, found by rendering once more with a sign at each of them.

        Marks whose sign the template drops are left out, and all are where signs change more than
        they add.
        """
        taken = set(_ANY_SIGN.findall(text))
        free = (sign for sign in map(chr, SIGNS) if sign not in taken)
        signs = dict(zip((mark for mark in marks if mark[0] != TOOLS), free, strict=False))
        if not signs:
            return {}
        signed = []
        for i, message in enumerate(messages):
            parts = [
                _sign(part, signs.get((i, j), "")) for j, part in enumerate(message["content"])
            ]
            signed.append({**message, "content": parts})
        rendered = self._render(signed, arguments)
        ours = re.compile(f"[{''.join(signs.values())}]")
        if ours.sub("", rendered) != text:
            return {}
        found = {match[0]: match.start() - i for i, match in enumerate(ours.finditer(rendered))}
        return {mark: found[sign] for mark, sign in signs.items() if sign in found}

    def _end_of_message(
        self, text: str, messages: Messages, arguments: Arguments, mark: Mark
    ) -> int:
        """Return where a message ends if what comes behind it changes nothing before it."""
        arguments = {**arguments, "add_generation_prompt": False}
        head = self._render(messages[: mark[0] + 1], arguments)
        return len(head) if text.startswith(head) else 0

    def _end_of_tool(self, text: str, messages: Messages, arguments: Arguments, mark: Mark) -> int:
        """Return the end of what another tool in this one's place would change."""
        tools = list(arguments["tools"])
        function = {"name": chr(SIGNS[0]), "description": "", "parameters": {}}
        tools[mark[1]] = {"type": "function", "function": function}
        other = self._render(messages, {**arguments, "tools": tools})
        lengths = range(1, min(len(text), len(other)) + 1)
        return len(text) - bisect_left(lengths, True, key=lambda n: not text.endswith(other[-n:]))

    def _render(self, messages: Messages, arguments: Arguments) -> str:
        try:
            told = {"add_generation_prompt": True, **self._printed(arguments), "tokenize": False}
            return str(self.tokenizer.apply_chat_template(_joined(messages), **told))
        except (jinja2.TemplateError, *_FAULTS) as error:
            why = "cannot render these messages."
            if isinstance(error, jinja2.TemplateError):
                why = f"refuses these messages: {error.message or type(error).__name__}"
            what = f"The model's chat template {why}"
            raise RequestError(what, param="messages", code="invalid_value") from None

    def _printed(self, arguments: Arguments) -> Arguments:
        if not (self._has_canonical_tools and arguments.get("tools")):
            return arguments
        return {**arguments, "tools": json.loads(json.dumps(arguments["tools"], sort_keys=True))}

    def _decode_one(self, token_id: int) -> Token:
        text = str(self.tokenizer.decode([token_id]))
        encoded, name = text.encode(), str(self.tokenizer.convert_ids_to_tokens(token_id))
        if "\N{REPLACEMENT CHARACTER}" in text:
            if match := re.fullmatch("<0x([0-9A-F]{2})>", name):
                encoded = bytes.fromhex(match[1])
            elif all(each in _BYTE_OF for each in name):
                encoded = bytes(map(_BYTE_OF.__getitem__, name))
        return Token(text, encoded)


def _joined(messages: Messages) -> list[dict[str, Any]]:
    return [{**message, "content": "\n".join(message["content"])} for message in messages]


def _sign(part: str, sign: str) -> str:
    """Return a part with a sign behind its last character that templates do not strip."""
    length = len(part.rstrip())
    return part[:length] + sign + part[length:] if length else part
