"""Turn texts and messages into token ids, and token ids into text.

This module uses the tokenizer and its chat template, but no HTTP. Work on a long text takes long,
so the callers decide in which thread it runs.

Messages and tools are text, even where they spell a special token such as `<|im_end|>`. Before the
template is rendered, a guard is put into each such spelling. After rendering, the guards are taken
out again, and each spelling that had one is encoded as text. The same holds for a special token
that a template would put together from a text of the client and one of its own. The ends of marked
texts are found in the same way, with signs of their own. Prompts of `/v1/completions` are not
guarded: they have no template, so that their special tokens are the client's to write.
"""

import contextlib
import copy
import functools
import itertools
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.prompt import too_long
from tieredkv.errors import RequestError
from tieredkv.server.chat_template import MAX_ROUNDS, ChatTemplate, Spans, template_of, variables_of
from tieredkv.server.diagnosis import PromptPart, parts_of
from tieredkv.server.encoding import Encoding
from tieredkv.server.histories import TOOL, TOOLS, Form, Mark, Messages, find_form
from tieredkv.server.hosted import Note
from tieredkv.server.message_parser import Family, Tools
from tieredkv.server.pieces import PieceEncoder, TooLongError, Trie
from tieredkv.server.remembered import Memory, Place, Writing
from tieredkv.server.rendered import (
    Rendered,
    ends_of,
    last_messages,
    needs_sign,
    signed_of,
    up_to_last_text,
)
from tieredkv.server.reply import Reading
from tieredkv.server.signs import Signs, fencing, guarding, mapped
from tieredkv.server.template_arguments import check_arguments
from tieredkv.server.template_clock import TALKS, Moment, Render, TemplateClock, tell_if_printed
from tieredkv.server.threads import Cancellation

logger = logging.getLogger(__name__)

CACHED_TOKENS = 65_536

Prompt = str | list[int]
MAX_TRIAL_ROUNDS = 10_000
"""How many rounds of loops a template may take for a conversation of a few words."""

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
        anchors: how many lie before the ends of the last message and of the last question, where
            the next turn may go on.
        parts: the tools and messages that were rendered.
        text: the text of the conversation.
        template: what the chat template was given beside messages and tools: its arguments, and
            what it was told of the time.
        place: where the answer begins; None if it cannot be remembered.
    """

    token_ids: list[int]
    ends: list[int]
    anchors: list[int] = []  # noqa: RUF012
    parts: Sequence[PromptPart] = ()
    text: str = ""
    place: Place | None = None
    template: Mapping[str, Any] = MappingProxyType({})


class Tokenization:
    """The tokenizer of one checkpoint; several threads may use it.

    Args:
        has_canonical_tools: whether tools are rendered with their keys sorted.
        allows_special: whether special tokens that messages spell out are encoded as these tokens
            instead of as text.
        max_model_len: the longest prompt; encoding stops as soon as a prompt is known to be longer.
        family: how the model writes messages; None if that is not known.
        template_arguments: for the chat template, where a conversation brings none of that name.
        clock: tells the chat template the time.

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
        clock: TemplateClock = TemplateClock(),  # noqa: B008
    ) -> None:
        self.tokenizer = tokenizer
        self._template_arguments = template_arguments
        self.family = family
        added = tokenizer.added_tokens_decoder.items()
        names = {id: str(token) for id, token in added if token.special}
        shown = {id: name for id, name in names.items() if family and family.names(name)}
        self._writing = Writing(family, frozenset(names.keys() - shown.keys()), shown)
        self._left_out = self._writing.hidden if shown else None
        self._ends = {id: name for id, name in names.items() if family and name in family.ends}
        self._memory: Memory | None = None
        self._has_canonical_tools = has_canonical_tools
        self._max_model_len = max_model_len
        self._encoder = PieceEncoder(tokenizer)
        self._allows_special = allows_special
        special = () if allows_special else self._encoder.special
        self._special_but = functools.lru_cache(4)(
            lambda looked_for: Trie(it for it in special if it not in looked_for)
        )
        self._special = Trie(self._encoder.special)
        self._trie_of = functools.lru_cache(4)(
            lambda searched: Trie(it for it in searched if len(it) > 1)
        )
        self._around = _around(tokenizer)
        self._namespace: object = ""
        self._cancellation, self._clock = Cancellation(), clock
        self._moment = Moment(clock.now())
        self.token = functools.lru_cache(CACHED_TOKENS)(self._decode_one)
        self._form_of = functools.lru_cache(4)(self._find_form)

    def of(
        self,
        namespace: object,
        cancellation: Cancellation | None = None,
        memory: Memory | None = None,
    ) -> "Tokenization":
        """Return a copy of this tokenization for one request.

        Args:
            namespace: the namespace whose pieces may be looked up; no other namespace can find out
                about its texts.
            cancellation: is set once the request is no longer wanted.
            memory: the remembered answers of the namespace, if any are to be used.
        """
        made = copy.copy(self)
        made._namespace, made._cancellation = namespace, cancellation or Cancellation()
        made._moment = Moment(self._clock.now())
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
            self._cancellation.check()
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
        client_arguments: Arguments = MappingProxyType({}),
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
            client_arguments: for the template, as the client gave them by name; they come before
                the others.
            is_bounded: whether a conversation that is longer than the context is refused.
            field: of the body that holds the conversation.
            continues_last: whether the answer goes on where the text of the last message ends,
                instead of beginning a new message.

        Raises:
            RequestError: there is no chat template, it does not read one of the client's arguments,
                it refuses these messages, it does not show the text that is to be continued, or the
                conversation is too long.
        """
        if not self.tokenizer.chat_template:
            why = "This model has no chat template, so it cannot answer chat requests."
            text = f"{why} Use /v1/completions instead."
            raise RequestError(text, param="messages", code="chat_template_missing")
        try:
            check_arguments(client_arguments, self._template(arguments))
            given_arguments = {**self._template_arguments, **arguments, **client_arguments}
            arguments = self._printed(given_arguments)
            given, form = messages, self.form(arguments)
            messages, marks = form.shaped(messages, marks, self.family)
            wanted = dict.fromkeys(marks)
            if continues_last:
                last = len(messages) - 1, len(messages[-1]["content"]) - 1
                wanted[last] = None
                arguments = {**arguments, "add_generation_prompt": False}
            rendered = self._render_guarded(messages, arguments, wanted)
        except RecursionError:
            what = "The model's chat template cannot render these messages."
            raise RequestError(what, param="messages", code="invalid_value") from None
        text, guards = rendered.text, rendered.guards
        if continues_last:
            text = up_to_last_text(rendered, last, messages[-1]["content"][-1], field)
            guards = guards[: bisect_right(guards, len(text))]
        limit = self._max_model_len if is_bounded else None
        try:
            encoding, place = self._encoded(text, guards, arguments, limit)
        except TooLongError:
            assert limit is not None, "only what has a limit is too long"
            # Clients shorten a conversation by the number of tokens that the error tells.
            num_tokens = len(self._encoded(text, guards, arguments, None)[0].ids)
            raise too_long(field, num_tokens, limit) from None
        ends = encoding.ends(map(rendered.end, marks))
        last_ends = (min(rendered.end(mark), len(text)) for mark in last_messages(messages))
        anchors = sorted({*encoding.ends(last_ends)} - {0})
        parts = parts_of(arguments.get("tools") or (), PLAIN.contents(given))
        template = {name: value for name, value in arguments.items() if name != "tools"}
        template = {"arguments": template, "time": dict(self._moment.told)}
        place = None if continues_last else place
        return Encoded(encoding.ids, ends, anchors, parts, text, place, template)

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
        return Reading(self.family, self._left_out, begun, tools, keep, self._ends)

    def decode(self, prompt: Prompt) -> str:
        """Return the text of a prompt that is a text or token ids."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt))

    def starts(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return where each token begins in the text of all tokens.

        A token that begins within a character begins where the character does.
        """
        detokenizer = Detokenizer(self.tokenizer, left_out=())
        lengths = []
        for token_id in token_ids:
            self._cancellation.check()
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
        try:
            ids = self._encoder.encode(
                text, self._namespace, limit=limit, cancellation=self._cancellation
            ).ids
        except TooLongError:
            assert limit is not None, "only what has a limit is too long"
            raise too_long("prompt", None, limit) from None
        return [*first, *ids, *last]

    def _encoded(
        self, text: str, guards: Sequence[int], arguments: Arguments, limit: int | None
    ) -> tuple[Encoding, Place | None]:
        """Encode a rendered conversation, and return it with where the next answer begins.

        Remembered answers have the ids that the model sampled.

        Raises:
            TooLongError: there are more than `limit` token ids.
        """
        # The template has written all special tokens, including the first one.
        encoding = self._encoder.encode(
            text, self._namespace, guards=guards, limit=limit, cancellation=self._cancellation
        )
        if self._memory is None:
            return encoding, None
        tools = arguments.get("tools") or ()
        replacements, place = self._memory.recall(encoding, self._writing, tools)
        encoding = encoding.replaced(replacements)
        if limit is not None and len(encoding.ids) > limit:
            raise TooLongError
        return encoding, place

    def _render_guarded(
        self, messages: Messages, arguments: Arguments, marks: Collection[Mark]
    ) -> Rendered:
        """Render with guards, and find marks.

        The ends of messages and tools are found in the same rendering, by the loops that write
        them. A second rendering has signs in the texts at the other marks. What it writes beside
        the signs must be the same, because a template may write something else because of them.

        A template may also join a text of the client and one of its own to a special token, as with
        `<function=` + name + `>`, where the name is `<|im_end|`. So texts that may have become a
        part of a special token get guards at their ends in the second rendering, and it shows if
        they have. Only if they have, and something else has changed, a third rendering without
        signs shows if the guards have changed it.

        Raises:
            RequestError: there is such a text, and the template writes something else around it
                because of the guards.
        """
        signs, spans = Signs(), Spans()
        guarded = self._guarded(messages, arguments, signs)
        first = signs.take_out(self._render(*guarded, spans))
        found = ends_of(spans, first.place, len(messages))
        controls = () if self._allows_special else self._encoder.controls(first.text, first.guards)
        fence = fencing(set(controls), signs.guard)
        fenced = (
            [{**mapped(fence, each), "role": each["role"]} for each in guarded[0]],
            {name: mapped(fence, each) for name, each in guarded[1].items()},
        )
        others = [mark for mark in marks if needs_sign(mark, found)]
        signed = signed_of(*fenced, others, signs)
        if signed == guarded:
            return Rendered(first.text, first.guards, found)
        second = signs.take_out(self._render(*signed))
        if second.text == first.text:
            found |= {others[i]: place for i, place in second.marks.items()}
        if fenced == guarded or self._encoder.controls(second.text, second.guards) == controls:
            return Rendered(first.text, first.guards, found)
        if second.text != first.text and others:
            second = signs.take_out(self._render(*fenced))
        if second.text == first.text:
            return Rendered(first.text, second.guards, found)
        what = "A text of this request would become a part of a special token of the model."
        raise RequestError(what, param="messages", code="invalid_value")

    def _guarded(
        self, messages: Messages, arguments: Arguments, signs: Signs
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages and arguments with a guard in each special token that a text spells.

        A token that the template itself looks for, such as `</think>`, gets no guard in texts of
        the assistant, because the template has to find it there. It must not find it in a note, and
        does not look for it in a call.
        """
        searched = self._template(arguments).looked_for
        looked_for = searched & {*self._encoder.special}

        of_special, of_searched = (
            guarding(trie, signs.guard) for trie in (self._special, self._trie_of(searched))
        )
        of_clients, of_answers = (
            functools.partial(mapped, guarding(self._special_but(but), signs.guard))
            for but in (frozenset[str](), looked_for)
        )
        guarded = []
        for message in messages:
            self._cancellation.check()
            guard = of_answers if message["role"] == "assistant" else of_clients
            texts = {name: guard(each) for name, each in message.items() if name != "role"}
            if "tool_calls" in texts:
                texts["tool_calls"] = of_clients(message["tool_calls"])
            if any(isinstance(part, Note) for part in message["content"]):
                parts = zip(message["content"], texts["content"], strict=True)
                texts["content"] = [
                    of_searched(of_special(it)) if isinstance(it, Note) else guarded_part
                    for it, guarded_part in parts
                ]
            guarded.append({"role": message["role"], **texts})
        return guarded, {name: of_clients(each) for name, each in arguments.items()}

    def _template(self, arguments: Arguments) -> ChatTemplate:
        try:
            return template_of(self.tokenizer.get_chat_template(tools=arguments.get("tools")))
        except (ValueError, jinja2.TemplateError) as error:
            what = f"The model's chat template cannot be used: {error}"
            raise RequestError(what, param="messages", code="invalid_value") from None

    def _render(self, messages: Messages, arguments: Arguments, spans: Spans | None = None) -> str:
        variables = variables_of(self.tokenizer, arguments)
        template = self._template(arguments)
        contents = self.form(arguments).contents(messages)
        if spans is not None:
            for i, message in enumerate(contents):
                spans.follow((i, -1), message)
            for i, tool in enumerate(arguments.get("tools") or ()):
                spans.follow((TOOLS, i), tool)
                if "function" in tool:
                    spans.follow((TOOLS, i), tool["function"])
        return template.render(
            self._cancellation, self._moment, MAX_ROUNDS, spans, messages=contents, **variables
        )

    def _printed(self, arguments: Arguments) -> Arguments:
        if not (self._has_canonical_tools and arguments.get("tools")):
            return arguments
        return {**arguments, "tools": json.loads(json.dumps(arguments["tools"], sort_keys=True))}

    def _find_form(self, template: ChatTemplate) -> Form:
        own = {**self._template_arguments, "tools": [TOOL]}
        variables = variables_of(self.tokenizer, own)
        for name in self._template_arguments.keys() - template.variables:
            logger.warning("the chat template does not read `%s` of `chat_template_kwargs`", name)
        for name in self._template_arguments.keys() & template.switches:
            if not isinstance(value := self._template_arguments[name], bool):
                what = (
                    "`%s` of `chat_template_kwargs` is true or false for the chat template, not %r"
                )
                logger.warning(what, name, value)

        def render(messages: list[dict[str, Any]]) -> str:
            rounds = MAX_TRIAL_ROUNDS
            return template.render(
                Cancellation(), self._moment, rounds, messages=messages, **variables
            )

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

        The log says if it prints the date or the time. A template that cannot be used is told to
        whoever sends a conversation.
        """
        if not self.tokenizer.chat_template:
            return
        renders, variables = list[Render](), set[str]()
        for tools in (None, [TOOL]):
            with contextlib.suppress(RequestError):
                self.form({"tools": tools})
                variables |= self._template({"tools": tools}).variables
                renders += (functools.partial(self._try, talk, tools) for talk in TALKS)
        if self._clock.fixed is None:
            tell_if_printed(renders, self._clock.now(), variables)

    def _try(self, messages: Messages, tools: Any, moment: Moment, given: Arguments) -> str:
        """Render a small conversation at a moment."""
        arguments = {**self._template_arguments, "tools": tools, **given}
        made = copy.copy(self)
        made._moment = moment
        return made._render(self.form(arguments).shaped(messages, (), self.family)[0], arguments)

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


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """Return the ids that a tokenizer puts before and after every text, or None if unknown."""
    text = "a"
    plain = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    whole = list(tokenizer.encode(text, verbose=False))
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return None
