"""An answer that is a message: its text, the model's thoughts, and its calls of tools.

This module knows neither HTTP nor the APIs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.server.message_parser import Call, Delta, Family, MessageParser, Tools


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read.

    Attributes:
        family: how the model writes; None for plain texts.
        left_out: ids of the special tokens that are no part of how it writes them; None if that is
            all of them.
        prompt: what the answers continue, from the family's `start` on.
        tools: that may be called.
        keep: takes each answer that the model itself has ended; None if nobody wants it.
        ends: names of the tokens that end an answer, beside those that the checkpoint names, by id.
    """

    family: Family | None
    left_out: Collection[int] | None
    prompt: str
    tools: Tools = ()
    keep: Callable[["Reply"], None] | None = None
    ends: Mapping[int, str] = field(default_factory=dict)


class Reply(Answer):
    """One request's answer so far, and the message that it is.

    Without a reading, the message is the text.

    Args:
        request: the request.
        tokenizer: gives the tokens their text.
        reading: how the answer is read.
        continues_text: whether the answer goes on with the text of its prompt.

    Attributes:
        num_thought_tokens: how many tokens have shown thoughts, without the marks around these.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: PreTrainedTokenizerBase,
        reading: Reading | None = None,
        *,
        continues_text: bool = False,
    ) -> None:
        left_out = reading.left_out if reading else None
        super().__init__(request, tokenizer, left_out=left_out, continues_text=continues_text)
        self._deltas: list[Delta] = []
        self.num_thought_tokens, self._num_quiet = 0, 0
        self._parser: MessageParser | None = None
        self._keep = reading.keep if reading else None
        if reading is not None and reading.family is not None:
            self._parser = MessageParser(reading.family, reading.prompt, reading.tools)

    def read(self, output: TokenOutput) -> tuple[str, list[Delta]]:
        """Take in one step's output; return the text and what of the message is certain now.

        What is added to a plain text may be empty, for a token that shows no text yet.
        """
        text = self.take(output)
        if self._parser is None:
            deltas = [Delta(text)]
        else:
            deltas = self._parser.feed(text)
            if self.finish_reason is not None:
                deltas += self._parser.finish()
        self._count_thoughts(len(output.token_ids), shown := [*filter(any, deltas)])
        self._deltas += shown
        if self._keep and self.finish_reason == "stop" and self.stopped_by is None:
            self._keep(self)
        return text, deltas

    def _count_thoughts(self, num_tokens: int, shown: Sequence[Delta]) -> None:
        """Count tokens that show thoughts; tokens that show nothing count if thoughts go on."""
        if not shown:
            self._num_quiet += num_tokens
            return
        if any(delta.thoughts for delta in shown):
            goes_on = bool(self._deltas) and bool(self._deltas[-1].thoughts)
            self.num_thought_tokens += num_tokens + self._num_quiet * goes_on
        self._num_quiet = 0

    @property
    def parts(self) -> list[Delta]:
        """The parts of the message so far: each a text, a stretch of thoughts, or a call."""
        parts = list[list[Delta]]()
        for delta in self._deltas:
            if parts and delta.continues(parts[-1][0]):
                parts[-1].append(delta)
            else:
                parts.append([delta])
        return [
            Delta(
                "".join(delta.text for delta in part),
                "".join(delta.thoughts for delta in part),
                part[0].call,
            )
            for part in parts
        ]

    @property
    def content(self) -> str:
        """The text of the message."""
        return "".join(delta.text for delta in self._deltas)

    @property
    def thoughts(self) -> str:
        """What the model thought."""
        return "".join(delta.thoughts for delta in self._deltas)

    @property
    def calls(self) -> list[Call]:
        """The calls of tools, in order."""
        return [delta.call for delta in self._deltas if delta.call is not None]

    @property
    def ends_with_calls(self) -> bool:
        """Whether the model ended the message because tools are to be called."""
        return self.finish_reason == "stop" and self.stopped_by is None and bool(self.calls)
