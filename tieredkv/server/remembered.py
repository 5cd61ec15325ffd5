"""The token ids that the model sampled for its answers, used again when the answers come back.

A conversation comes back as text. Encoding it again may give other ids than the model sampled, and
then nothing behind the answer is found in the cache. A template may also print a call of a tool in
another way than the model wrote it. So the ids of an answer are kept, and they stand in the prompt
of a later turn in place of those of the rendered message, if

- the ids before the message are exactly those of the prompt that was answered, and
- the rendered message reads as the same message: equal thoughts, text and calls, read by the parser
  that read the answer. It ends with the token that ended the answer.

So what replaces a text means the same as the text, whatever the template does. If it drops the
thoughts of earlier turns, for example, the rendered message reads as another one and stays. White
space at the ends of texts, and how JSON is written, make no difference. A miss costs no more than
computing the answer again.

Everything is in memory. This module knows no APIs.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tieredkv.errors import IntegrityError
from tieredkv.server.encoding import EncodedPiece, Encoding, Replacement
from tieredkv.server.message_parser import Call, Family, MessageParser, Tools
from tieredkv.server.tenant_store import TenantStore

ENTRY_BYTES = 1024
"""What an answer is taken to need beside its ids, so that many short ones are bounded, too."""

MAX_TAIL_CHARACTERS = 1024
"""Answers to prompts with more than this behind the last added token are not remembered."""

Namespace = tuple[str, str | None, str | None]
"""The tenant, cache salt and cache key of a request."""


class Opening(NamedTuple):
    """What stands around an answer.

    Attributes:
        tail: the end of the prompt's text, from its last added token on.
        begun: what of the prompt tells how the answer is read, as `Family.begun` returns it.
        end_id: the token that ended the answer.
    """

    tail: str
    begun: str
    end_id: int


class Key(NamedTuple):
    """By what an answer is found.

    Attributes:
        namespace: of the request; no other namespace can find out about its answers.
        before: the digest of the prompt's ids before its last added token.
        opening: what stands around the answer.
        message: the digest of what the answer says.
    """

    namespace: Namespace
    before: bytes
    opening: Opening
    message: bytes


@dataclass(slots=True, eq=False)
class Remembered:
    """The token ids of one answer.

    Attributes:
        ids: its token ids, without the one that ended it.
        namespace: the digest of the namespace that its request's blocks are in.
        used_at: seconds since the epoch, when it was last looked up.
        rendered: the digest of the last text that was found to read as the same message, so that
            it need not be read again.
    """

    ids: "array[int]"
    namespace: bytes
    used_at: float = 0.0
    rendered: bytes = b""


class RememberedAnswers(TenantStore[Key, Remembered]):
    """The remembered answers of all tenants; any thread may call it.

    Where there is no room for another answer, the one goes that was used longest ago, of the tenant
    with the most bytes.

    Invariants, which `check` verifies:
        - Each answer is found behind the ids of its prompt, and nothing else is.
        - A tenant's bytes are those of its answers.
        - All tenants together hold at most `max_bytes`, and none of them holds nothing.
    """

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        super().__init__(max_bytes, now)
        self._behind: dict[tuple[Namespace, bytes], dict[Key, Remembered]] = {}

    def add(self, key: Key, answer: Remembered) -> None:
        """Remember an answer, if it fits at all."""
        with self._lock:
            answer.used_at = self._now()
            self._put(key.namespace[0], key, answer)

    def behind(self, namespace: Namespace, before: bytes) -> Mapping[Key, Remembered]:
        """Return the answers that are known behind these ids."""
        with self._lock:
            return {**self._behind.get((namespace, before), {})}

    def touch(self, keys: Sequence[Key]) -> None:
        """Take note that answers were used; the first of them stays longest."""
        with self._lock:
            for key in reversed(keys):
                answers = self._of.get(key.namespace[0], {})
                if (answer := answers.pop(key, None)) is not None:
                    answer.used_at = self._now()
                    answers[key] = answer

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            IntegrityError: one of them is broken.
        """
        with self._lock:
            behind: dict[tuple[Namespace, bytes], dict[Key, Remembered]] = {}
            for tenant, answers in self._of.items():
                for key, answer in answers.items():
                    behind.setdefault((key.namespace, key.before), {})[key] = answer
                size = sum(_size(key, answer) for key, answer in answers.items())
                if not answers or size != self._bytes[tenant]:
                    raise IntegrityError(f"{size} bytes are held as {self._bytes[tenant]}")
            if behind != self._behind:
                raise IntegrityError("an answer is not found, or one that is gone is")
            if self._bytes.total() > self._max_bytes or self._bytes.keys() != self._of.keys():
                raise IntegrityError(f"{self._bytes.total()} of {self._max_bytes} bytes are held")

    def _hold(self, _tenant: str, key: Key, answer: Remembered) -> int:
        self._behind.setdefault((key.namespace, key.before), {})[key] = answer
        return _size(key, answer)

    def _release(self, _tenant: str, key: Key, answer: Remembered) -> int:
        behind = self._behind[key.namespace, key.before]
        del behind[key]
        if not behind:
            del self._behind[key.namespace, key.before]
        return _size(key, answer)


def _size(key: Key, answer: Remembered) -> int:
    return ENTRY_BYTES + 4 * len(answer.ids) + 4 * len(key.opening.tail + key.opening.begun)


class Writing(NamedTuple):
    """How a model writes messages.

    Attributes:
        family: None if that is not known; then messages are plain texts.
        hidden: ids of the special tokens that are no part of a message.
        shown: ids and spellings of the other ones.
    """

    family: Family | None
    hidden: frozenset[int]
    shown: Mapping[int, str]

    def read(self, begun: str, written: str, tools: Tools) -> bytes:
        """Return the digest of the message that a text is.

        Args:
            begun: what of the prompt tells how it is read.
            written: the text.
            tools: that may be called.
        """
        if self.family is None:
            return self.digest("", written, (), written)
        parser = MessageParser(self.family, begun, tools)
        deltas = [*parser.feed(written), *parser.finish()]
        thoughts, text = ("".join(getattr(it, of) for it in deltas) for of in ("thoughts", "text"))
        return self.digest(thoughts, text, [it.call for it in deltas if it.call], written)

    def digest(self, thoughts: str, text: str, calls: Sequence[Call], written: str) -> bytes:
        """Return the digest of a message, in which white space at the ends does not count.

        Args:
            thoughts: what the model thought.
            text: the text of the message.
            calls: the calls of tools.
            written: all of it, as the model or the template wrote it. What a parser skips is no
                part of the message. Where it is a text that clients can write, it must be there
                equally often.
        """
        skip = self.family.skip if self.family else ""
        skipped = [it[0] for it in re.finditer(skip, written)] if skip else []
        told = [
            thoughts.strip(),
            text.strip(),
            [(call.name, json.loads(call.arguments)) for call in calls],
            sum(not any(name in each for name in self.shown.values()) for each in skipped),
        ]
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=32).digest()


class Answered(Protocol):
    """What is remembered of an answer: `text` is all of it, and the others are its parts."""

    token_ids: list[int]
    text: str

    @property
    def content(self) -> str:
        """The text of the message."""

    @property
    def thoughts(self) -> str:
        """What the model thought."""

    @property
    def calls(self) -> list[Call]:
        """The calls of tools, in order."""


class Place(NamedTuple):
    """Where the answer to a prompt begins: `before` and `tail` as `Key` and `Opening` have them."""

    before: bytes
    tail: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The remembered answers of one namespace.

    Attributes:
        answers: those of all namespaces.
        namespace: whose answers are looked up.
        digest: the digest of the namespace that its blocks are in.
        is_known: tells whether requests of a tenant are still taken.
    """

    answers: RememberedAnswers
    namespace: Namespace
    digest: bytes
    is_known: Callable[[str], bool] = field(default=lambda _tenant: True)

    def recall(
        self, encoding: Encoding, writing: Writing, tools: Tools
    ) -> tuple[Sequence[Replacement], Place | None]:
        """Return the answers that stand in a conversation, and where its next answer begins.

        Args:
            encoding: the encoded text of the conversation.
            writing: how the model writes messages.
            tools: that may be called.
        """
        pieces, digest = encoding.pieces, hashlib.blake2b(digest_size=32)
        found, keys, index, before = list[Replacement](), list[Key](), 0, b""
        while index < len(pieces):
            encoding.cancellation.check()
            before = digest.digest()
            known = self.answers.behind(self.namespace, before)
            new = None
            for opening in {key.opening for key in known}:
                if (end := _end_of_message(pieces, index, opening, writing)) is None:
                    continue
                written = "".join(piece.text for piece in pieces[index:end])[len(opening.tail) :]
                written += writing.shown.get(opening.end_id, "")
                if (key := _find(known, opening, written, writing, tools)) is not None:
                    head = encoding.ids_of(opening.tail)
                    ids = head + known[key].ids
                    new = Replacement(index, end, len(opening.tail), len(head), ids)
                    found.append(new)
                    keys.append(key)
                    break
            digest.update(pieces[index].ids if new is None else new.ids)
            index = index + 1 if new is None else new.end
        self.answers.touch(keys)
        last = pieces[-1] if len(pieces) > 1 else None
        if last is None or last.guards or len(last.text) > MAX_TAIL_CHARACTERS:
            return found, None
        return found, Place(before, last.text)

    def keep(self, writing: Writing, place: Place, begun: str, answer: Answered) -> None:
        """Remember an answer that the model has ended.

        It is not remembered if it does not end with a special token, or if it holds one before
        that is no part of a message.

        Args:
            writing: how the model writes messages.
            place: where the answer begins.
            begun: what of the prompt tells how the answer is read.
            answer: all of it.
        """
        *ids, end_id = answer.token_ids or [0]
        is_ended = end_id in writing.hidden or end_id in writing.shown
        if not (ids and is_ended and writing.hidden.isdisjoint(ids)):
            return
        if not self.is_known(self.namespace[0]):  # Its key was removed meanwhile.
            return
        message = writing.digest(answer.thoughts, answer.content, answer.calls, answer.text)
        key = Key(self.namespace, place.before, Opening(place.tail, begun, end_id), message)
        self.answers.add(key, Remembered(array("I", ids), self.digest))


def _end_of_message(
    pieces: Sequence[EncodedPiece], index: int, opening: Opening, writing: Writing
) -> int | None:
    """Return the index of the piece that begins with the end token of a message.

    Returns:
        None if no message begins so in the piece at `index` and ends so, or if a client has spelled
        a special token in it.
    """
    if not pieces[index].text.startswith(opening.tail):
        return None
    for end in range(index, len(pieces)):
        piece = pieces[end]
        if end > index and piece.ids[0] == opening.end_id:
            return end
        if piece.guards or (end > index and piece.ids[0] in writing.hidden):
            return None
    return None


def _find(
    known: Mapping[Key, Remembered], opening: Opening, written: str, writing: Writing, tools: Tools
) -> Key | None:
    """Return the key of the answer that says the same as a rendered message; None if none does."""
    rendered = hashlib.blake2b(written.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    for key, answer in known.items():
        if key.opening == opening and answer.rendered == rendered:
            return key
    message = writing.read(opening.begun, written, tools)
    for key, answer in known.items():
        if key.opening == opening and key.message == message:
            answer.rendered = rendered
            return key
    return None
