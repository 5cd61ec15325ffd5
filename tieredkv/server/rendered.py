"""A rendered conversation: where its messages, tools and texts end.

Signs that stand in texts, and the loops of the template, show the places. This module does not know
how templates are rendered, nor what tokens are.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tieredkv.errors import RequestError
from tieredkv.server.chat_template import Spans
from tieredkv.server.histories import TOOLS, Mark
from tieredkv.server.signs import Signs, with_sign, with_signs


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: without guards and signs.
        guards: where in the text a special token that a client has spelled is to be text.
        ends: where marks are, as far as that is known: those of texts, of messages as `(i, -1)`,
            and of tools.
    """

    text: str
    guards: list[int]
    ends: Mapping[Mark, int]

    def end(self, mark: Mark) -> int:
        """Return where a mark is, else the end of its message, else 0."""
        return self.ends.get(mark, self.ends.get((mark[0], -1), 0))


def ends_of(spans: Spans, place: Callable[[int], int], num_messages: int) -> dict[Mark, int]:
    """Return where messages and tools end, by what the template's loops have shown.

    A message that no loop has come to ends where the next one begins.

    Args:
        spans: where loops have begun and ended their rounds.
        place: returns the place in the text for one in the rendering with guards.
        num_messages: how many messages there are.
    """
    ends: dict[Mark, int] = {mark: place(end) for mark, (_, end) in spans.of.items()}
    begins_next: int | None = None
    for i in reversed(range(num_messages)):
        if (span := spans.of.get((i, -1))) is not None:
            begins_next = place(span[0])
        elif begins_next is not None:
            ends[i, -1] = begins_next
    return ends


def last_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the ends of the last message and of the last one that a user wrote."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [(i, -1) for i in (len(messages) - 1, *users[-1:])]


def needs_sign(mark: Mark, found: Collection[Mark]) -> bool:
    """Return whether a mark is to be found by a sign: one of a text, or of a tool not found yet."""
    return mark not in found and (mark[0] == TOOLS or mark[1] >= 0)


def signed_of(
    messages: list[dict[str, Any]], arguments: dict[str, Any], marks: Sequence[Mark], signs: Signs
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages and arguments with a sign at each mark; its number is that of the mark.

    A mark of a tool is at the end of the last of its texts.
    """
    messages = [*messages]
    for index, (i, j) in enumerate(marks):
        sign = signs.mark(index)
        if i == TOOLS:
            tools = [*arguments["tools"]]
            tools[j] = with_signs(tools[j], sign)
            arguments = {**arguments, "tools": tools}
        else:
            parts = [*messages[i]["content"]]
            parts[j] = with_sign(parts[j], sign)
            messages[i] = {**messages[i], "content": parts}
    return messages, arguments


def up_to_last_text(rendered: Rendered, last: Mark, part: str, field: str) -> str:
    """Return a rendered text up to the end of the last message's text, as the client wrote it.

    Raises:
        RequestError: the template does not show where that is.
    """
    if (place := rendered.ends.get(last)) is None:
        what = "The model's chat template does not show where the text of the last message ends"
        raise RequestError(f"{what}, so it cannot be continued.", param=field)
    return rendered.text[:place] + part[len(part.rstrip()) :]
