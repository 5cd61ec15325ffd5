"""Turn texts and messages into token ids, and token ids into text.

This module uses the tokenizer and its chat template, but no HTTP. Work on a long text takes long,
so the callers decide in which thread it runs.

Messages and tools are text, even where they spell a special token such as `<|im_end|>`. Before the
template is rendered, a guard is put into each such spelling. After rendering, the guards are taken
out again, and each spelling that had one is encoded as text. The same holds for a special token
that a template would put together from a text of the client and one of its own. The ends of marked
parts are found in the same way, with signs of their own. Prompts of `/v1/completions` are not
guarded: they have no template, so that their special tokens are the client's to write.
"""

import contextlib
import copy
import functools
import itertools
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.prompt import too_long
from tieredkv.errors import RequestError
from tieredkv.server.chat_template import ChatTemplate, template_of, variables_of
from tieredkv.server.diagnosis import Part, parts_of
from tieredkv.server.encoding import Encoding
from tieredkv.server.histories import TOOL, TOOLS, Form, Mark, Messages, find_form
from tieredkv.server.message_parser import Family, Tools
from tieredkv.server.pieces import PieceEncoder, TooLongError, Trie
from tieredkv.server.remembered import Memory, Place, Writing
from tieredkv.server.reply import Reading
from tieredkv.server.signs import Signs, fencing, guarding, mapped, with_sign
from tieredkv.server.threads import Stop

logger = logging.getLogger(__name__)

CACHED_TOKENS = 65_536

Prompt = str | list[int]
MAX_TRIAL_ROUNDS = 10_000
"""How many rounds of loops a template may take for a conversation of a few words."""

MAX_RENDERINGS = 100
MAX_RENDERED_CHARACTERS = 1 << 24
"""Limits on finding marks by one more rendering each: how many renderings there may be, and how
many characters they may have together."""

_BYTE_OF = {each: byte for byte, each in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
"""The byte for each character that byte-level vocabularies write in its place."""

Arguments = Mapping[str, Any]
PLAIN = Form()


class Token(NamedTuple):
    """The text and bytes of one token; the bytes may be only a part of a character."""

    text: str
    encoded: bytes

    @property
    def label(self) -> str:
        """The text of the token or, if it has none by itself, its bytes as OpenAI writes them."""
        if self.text.encode() == self.encoded:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.encoded)


class Encoded(NamedTuple):
    """The token ids of a conversation, and how many of them lie before each mark.

    Attributes:
        parts: the tools and messages that were rendered.
        text: the text of the conversation.
        place: where the answer begins; None if it cannot be remembered.
    """

    token_ids: list[int]
    ends: list[int]
    parts: Sequence[Part] = ()
    text: str = ""
    place: Place | None = None


class Tokenization:
    """The tokenizer of one checkpoint; several threads may use it.

    Args:
        has_canonical_tools: whether tools are rendered with their keys sorted.
        allows_special: whether special tokens that messages spell out are encoded as these tokens
            instead of as text.
        max_model_len: the longest prompt; encoding stops as soon as a prompt is known to be longer.
        family: how the model writes messages; None if that is not known.
        template_arguments: for the chat template, where a conversation brings none of that name.

    Attributes:
        tokenizer, family: as given.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        has_canonical_tools: bool = False,
        allows_special: bool = False,
        max_model_len: int | None = None,
        family: Family | None = None,
        template_arguments: Arguments = MappingProxyType({}),
    ) -> None:
        self.tokenizer = tokenizer
        self._template_arguments = template_arguments
        self.family = family
        added = tokenizer.added_tokens_decoder.items()
        names = {id: str(token) for id, token in added if token.special}
        shown = {id: name for id, name in names.items() if family and family.names(name)}
        self._writing = Writing(family, frozenset(names.keys() - shown.keys()), shown)
        self._left_out = self._writing.hidden if shown else None
        self._memory: Memory | None = None
        self._has_canonical_tools = has_canonical_tools
        self._max_model_len = max_model_len
        self._encoder = PieceEncoder(tokenizer)
        self._allows_special = allows_special
        special = () if allows_special else self._encoder.special
        self._special_but = functools.lru_cache(4)(
            lambda looked_for: Trie(it for it in special if it not in looked_for)
        )
        self._around = _around(tokenizer)
        self._namespace: object = ""
        self._stop = Stop()
        self.token = functools.lru_cache(CACHED_TOKENS)(self._decode_one)
        self._form_of = functools.lru_cache(4)(self._find_form)

    def of(
        self, namespace: object, stop: Stop | None = None, memory: Memory | None = None
    ) -> "Tokenization":
        """Return a copy of this tokenization for one request.

        Args:
            namespace: the namespace whose pieces may be looked up; no other namespace can find out
                about its texts.
            stop: is set once the request is no longer wanted.
            memory: the remembered answers of the namespace, if any are to be used.
        """
        made = copy.copy(self)
        made._namespace, made._stop = namespace, stop or Stop()
        # A client that may write special tokens can make one message look like another.
        made._memory = None if self._allows_special else memory
        return made

    def encode_prompts(
        self, prompts: Sequence[Prompt], *, is_bounded: bool = True, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of prompts; prompts that are token ids are returned unchanged.

        Special tokens that a text spells out are encoded as these tokens.

        Raises:
            RequestError: `is_bounded` is set and a prompt is longer than the context.
        """
        limit = self._max_model_len if is_bounded else None
        encoded = []
        for prompt in prompts:
            self._stop.check()
            if isinstance(prompt, str):
                encoded.append(self._encode(prompt, limit, add_special_tokens))
            elif limit is not None and len(prompt) > limit:
                raise too_long("prompt", len(prompt), limit)
            else:
                encoded.append(prompt)
        return encoded

    def encode_chat(
        self,
        messages: Messages,
        arguments: Arguments,
        marks: Sequence[Mark] = (),
        *,
        is_bounded: bool = True,
        field: str = "messages",
        continues_last: bool = False,
    ) -> Encoded:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        Special tokens that messages spell out are encoded as text. Answers of the model that are
        remembered have the ids that it sampled. If the template moves or drops
        the text at a mark, the mark's place is the end of its message or, if that is not known
        either, 0.

        Args:
            messages: the conversation.
            arguments: for the template.
            marks: whose places are wanted.
            is_bounded: whether a conversation that is longer than the context is refused.
            field: of the body that holds the conversation.
            continues_last: whether the answer goes on where the text of the last message ends,
                instead of beginning a new message.

        Raises:
            RequestError: there is no chat template, it refuses these messages, it does not show the
                text that is to be continued, or the conversation is too long.
        """
        if not self.tokenizer.chat_template:
            why = "This model has no chat template, so it cannot answer chat requests."
            text = f"{why} Use /v1/completions instead."
            raise RequestError(text, param="messages", code="chat_template_missing")
        signs = Signs()
        try:
            arguments = self._printed({**self._template_arguments, **arguments})
            given, form = messages, self.form(arguments)
            messages, marks = form.shaped(messages, marks, self.family)
            if continues_last:
                arguments = {**arguments, "add_generation_prompt": False}
            rendered, guarded = self._render_guarded(messages, arguments, signs)
            whole = rendered
            if continues_last:
                rendered = self._up_to_last_text(rendered, guarded, signs, field)
        except RecursionError:
            what = "The model's chat template cannot render these messages."
            raise RequestError(what, param="messages", code="invalid_value") from None
        text, guards = signs.take_out_guards(rendered)
        limit = self._max_model_len if is_bounded else None
        with _refusing_long(field, limit):
            # The template has written all special tokens, including the first one.
            encoding = self._encoder.encode(
                text, self._namespace, guards=guards, limit=limit, stop=self._stop
            )
            encoding, place = self._recalled(encoding, arguments, limit)
        places = self._places(whole, *guarded, marks, signs) if marks else []
        width = len(signs.guard)
        before = [guard + i * width for i, guard in enumerate(guards)]
        ends = encoding.ends(place - width * bisect_left(before, place) for place in places)
        parts = parts_of(arguments.get("tools") or (), PLAIN.contents(given))
        return Encoded(encoding.ids, ends, parts, text, None if continues_last else place)

    def reading(self, encoded: Encoded, tools: Tools) -> Reading | None:
        """Return how answers to a conversation are read and remembered; None if neither is done.

        Args:
            encoded: the conversation.
            tools: that may be called.
        """
        begun = self.family.begun(encoded.text) if self.family else ""
        keep = None
        if self._memory and encoded.place:
            keep = functools.partial(self._memory.keep, self._writing, encoded.place, begun)
        if not (self.family or keep):
            return None
        return Reading(self.family, self._left_out, begun, tools, keep)

    def decode(self, prompt: Prompt) -> str:
        """Return the text of a prompt that is a text or token ids."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt))

    def starts(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return where each token begins in the text of all tokens.

        A token that begins within a character begins where the character does.
        """
        detokenizer = Detokenizer(self.tokenizer, shows_special=True)
        lengths = []
        for token_id in token_ids:
            self._stop.check()
            lengths.append(len(detokenizer.feed([token_id])))
        detokenizer.finish()
        # Tokens that the tokenizer put before the text are not part of the text.
        num_added = len(detokenizer.text) - len(text)
        starts = itertools.accumulate([-num_added, *lengths])
        return [max(0, start) for start in starts][: len(token_ids)]

    def _encode(self, text: str, limit: int | None, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._around is None:
            return list(self.tokenizer.encode(text, verbose=False))
        first, last = self._around if add_special_tokens and self._around else ([], [])
        with _refusing_long("prompt", limit):
            ids = self._encoder.encode(text, self._namespace, limit=limit, stop=self._stop).ids
        return [*first, *ids, *last]

    def _recalled(
        self, encoding: Encoding, arguments: Arguments, limit: int | None
    ) -> tuple[Encoding, Place | None]:
        """Return an encoding with the ids of remembered answers, and where the next one begins.

        Raises:
            TooLongError: there are more than `limit` token ids.
        """
        if self._memory is None:
            return encoding, None
        tools = arguments.get("tools") or ()
        replacements, place = self._memory.recall(encoding, self._writing, tools)
        encoding = encoding.replaced(replacements)
        if limit is not None and len(encoding.ids) > limit:
            raise TooLongError
        return encoding, place

    def _render_guarded(
        self, messages: Messages, arguments: Arguments, signs: Signs
    ) -> tuple[str, tuple[Messages, Arguments]]:
        """Render with guards, and return the rendered text and what it was rendered from.

        A template may join a text of the client and one of its own to a special token, as with
        `<function=` + name + `>`, where the name is `<|im_end|`. So texts that may have become a
        part of a special token get guards at their ends, and a second rendering shows if they have.

        Raises:
            RequestError: there is such a text, and the template writes something else around it
                because of the guards.
        """
        guarded = self._guarded(messages, arguments, signs)
        rendered = self._render(*guarded)
        text, guards = signs.take_out_guards(rendered)
        controls = [] if self._allows_special else self._encoder.controls(text, guards)
        fence = fencing(set(controls), signs.guard)
        fenced = [{**mapped(fence, each), "role": each["role"]} for each in guarded[0]]
        others = fenced, {name: mapped(fence, each) for name, each in guarded[1].items()}
        if others == guarded:
            return rendered, guarded
        rendered_again = self._render(*others)
        text_again, guards = signs.take_out_guards(rendered_again)
        if self._encoder.controls(text_again, guards) == controls:  # all are the template's own
            return rendered, guarded
        if text_again == text:
            return rendered_again, others
        what = "A text of this request would become a part of a special token of the model."
        raise RequestError(what, param="messages", code="invalid_value")

    def _up_to_last_text(
        self, text: str, guarded: tuple[Messages, Arguments], signs: Signs, field: str
    ) -> str:
        """Return a rendered text up to the end of the last message's text, as the client wrote it.

        Raises:
            RequestError: the template does not show where that is.
        """
        parts: list[str] = guarded[0][-1]["content"]
        last = len(guarded[0]) - 1, len(parts) - 1
        place = self._places_of_signs(text, *guarded, [last], signs).get(last)
        if place is None:
            what = "The model's chat template does not show where the text of the last message ends"
            raise RequestError(f"{what}, so it cannot be continued.", param=field)
        return text[:place] + parts[-1][len(parts[-1].rstrip()) :]

    def _guarded(
        self, messages: Messages, arguments: Arguments, signs: Signs
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages and arguments with a guard in each special token that a text spells.

        A token that the template itself looks for, such as `</think>`, gets no guard in messages of
        the assistant, because the template has to find it there.
        """
        looked_for = self._template(arguments).looked_for & {*self._encoder.special}
        of_clients, of_answers = (
            functools.partial(mapped, guarding(self._special_but(but), signs.guard))
            for but in (frozenset[str](), looked_for)
        )
        guarded = []
        for message in messages:
            self._stop.check()
            guard = of_answers if message["role"] == "assistant" else of_clients
            texts = {name: guard(each) for name, each in message.items() if name != "role"}
            guarded.append({"role": message["role"], **texts})
        return guarded, {name: of_clients(each) for name, each in arguments.items()}

    def _places(
        self,
        text: str,
        messages: Messages,
        arguments: Arguments,
        marks: Sequence[Mark],
        signs: Signs,
    ) -> list[int]:
        """Return where each mark is in a rendered text."""
        found: dict[Mark, int] = {}
        with contextlib.suppress(RequestError):
            found = self._places_of_signs(text, messages, arguments, marks, signs)
        places = dict.fromkeys(marks, 0) | found
        num_renderings = min(MAX_RENDERINGS, MAX_RENDERED_CHARACTERS // max(1, len(text)))
        others = [mark for mark in places if mark not in found]
        for mark in others[max(0, len(others) - num_renderings) :]:
            find = self._end_of_tool if mark[0] == TOOLS else self._end_of_message
            with contextlib.suppress(RequestError):
                places[mark] = find(text, messages, arguments, mark)
        return [places[mark] for mark in marks]

    def _places_of_signs(
        self,
        text: str,
        messages: Messages,
        arguments: Arguments,
        marks: Iterable[Mark],
        signs: Signs,
    ) -> dict[Mark, int]:
        """Return the places of marks, found by one more rendering with a sign at each mark.

        A mark is left out if the template drops its sign. All marks are left out if the signs
        change anything else in the rendered text.
        """
        wanted = dict.fromkeys(mark for mark in marks if mark[0] != TOOLS)
        if not wanted:
            return {}
        sign_of = {mark: signs.mark(i) for i, mark in enumerate(wanted)}
        signed = []
        for i, message in enumerate(messages):
            parts = [
                with_sign(part, sign_of.get((i, j), ""))
                for j, part in enumerate(message["content"])
            ]
            signed.append({**message, "content": parts})
        rendered, places = signs.take_out_marks(self._render(signed, arguments))
        if rendered != text:
            return {}
        return {mark: places[i] for i, mark in enumerate(wanted) if i in places}

    def _end_of_message(
        self, text: str, messages: Messages, arguments: Arguments, mark: Mark
    ) -> int:
        """Return where a message ends, or 0 if later messages change the text before its end."""
        arguments = {**arguments, "add_generation_prompt": False}
        head = self._render(messages[: mark[0] + 1], arguments)
        return len(head) if text.startswith(head) else 0

    def _end_of_tool(self, text: str, messages: Messages, arguments: Arguments, mark: Mark) -> int:
        """Return where a tool ends: the end of the text that changes with another tool there."""
        tools = list(arguments["tools"])
        function = {"name": "\U000f0000", "description": "", "parameters": {}}
        tools[mark[1]] = {"type": "function", "function": function}
        other = self._render(messages, {**arguments, "tools": tools})
        lengths = range(1, min(len(text), len(other)) + 1)
        return len(text) - bisect_left(lengths, True, key=lambda n: not text.endswith(other[-n:]))

    def _template(self, arguments: Arguments) -> ChatTemplate:
        try:
            return template_of(self.tokenizer.get_chat_template(tools=arguments.get("tools")))
        except (ValueError, jinja2.TemplateError) as error:
            what = f"The model's chat template cannot be used: {error}"
            raise RequestError(what, param="messages", code="invalid_value") from None

    def _render(self, messages: Messages, arguments: Arguments) -> str:
        variables = variables_of(self.tokenizer, arguments)
        template = self._template(arguments)
        contents = self.form(arguments).contents(messages)
        return template.render(self._stop, messages=contents, **variables)

    def _printed(self, arguments: Arguments) -> Arguments:
        if not (self._has_canonical_tools and arguments.get("tools")):
            return arguments
        return {**arguments, "tools": json.loads(json.dumps(arguments["tools"], sort_keys=True))}

    def _find_form(self, template: ChatTemplate) -> Form:
        own = {**self._template_arguments, "tools": [TOOL]}
        variables = variables_of(self.tokenizer, own)
        for name in self._template_arguments.keys() - template.variables:
            logger.warning("the chat template does not read `%s` of `chat_template_kwargs`", name)

        def render(messages: list[dict[str, Any]]) -> str:
            return template.render(Stop(), MAX_TRIAL_ROUNDS, messages=messages, **variables)

        form = find_form(render, template.names, self.family)
        if form != PLAIN:
            others = ", ".join(
                f"{name}={value!r}"
                for name, value in form._asdict().items()
                if value != getattr(PLAIN, name)
            )
            logger.info("conversations are given to the chat template with %s", others)
        return form

    def try_template(self) -> None:
        """Find out in which form the chat template takes conversations, with tools and without.

        A template that cannot be used is told to whoever sends a conversation.
        """
        if self.tokenizer.chat_template:
            for tools in (None, [TOOL]):
                with contextlib.suppress(RequestError):
                    self.form({"tools": tools})

    def form(self, arguments: Arguments) -> Form:
        """Return the form in which the chat template takes conversations.

        Raises:
            RequestError: the chat template cannot be used.
        """
        return self._form_of(self._template(arguments))

    def _decode_one(self, token_id: int) -> Token:
        text = str(self.tokenizer.decode([token_id]))
        encoded, name = text.encode(), str(self.tokenizer.convert_ids_to_tokens(token_id))
        if "\N{REPLACEMENT CHARACTER}" in text:
            if match := re.fullmatch("<0x([0-9A-F]{2})>", name):
                encoded = bytes.fromhex(match[1])
            elif all(each in _BYTE_OF for each in name):
                encoded = bytes(map(_BYTE_OF.__getitem__, name))
        return Token(text, encoded)


@contextlib.contextmanager
def _refusing_long(field: str, limit: int | None) -> Iterator[None]:
    try:
        yield
    except TooLongError:
        assert limit is not None, "only what has a limit is too long"
        raise too_long(field, None, limit) from None


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """Return the ids that a tokenizer puts before and after every text, or None if unknown."""
    text = "a"
    plain = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    whole = list(tokenizer.encode(text, verbose=False))
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return None
