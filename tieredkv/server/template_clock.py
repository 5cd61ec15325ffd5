"""The date and time that chat templates are told, and whether a template prints them.

What a template prints of the time stands near the top of each prompt. As soon as it changes, no
block of an earlier prompt is found again. This module knows dates and templates, but no tokens.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from typing import Any

from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.kinds import AT_START

logger = logging.getLogger(__name__)

Render = Callable[["Moment", Mapping[str, Any]], str]
"""Renders a small conversation at a moment, with further arguments for the template."""

_ASKED = {"role": "user", "content": ["What is this?"]}
TALKS = ([{"role": "system", "content": ["Be brief."]}, _ASKED], [_ASKED])
"""Templates that bring a system message of their own may print the date in that one only."""

_LATER = (timedelta(days=1), timedelta(days=400))
"""After these times the day, and after the second one also the month and the year, are others."""

_WAY_OUT = (
    "set `template_date` to a day such as %s, or to `start`, which keeps one date while the server "
    "runs"
)


class Moment:
    """The time that a template is told, the same in all renderings of a request.

    Attributes:
        told: what it was told, by the format that it asked for; empty if it did not ask.
    """

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.told = dict[str, str]()

    def strftime(self, format: str) -> str:
        """Return the time in a format, as templates ask for it."""
        text = self.told[format] = self.now.strftime(format)
        return text


@dataclass(frozen=True)
class TemplateClock:
    """Tells templates the time, which is local.

    Attributes:
        clock: the present time.
        fixed: the only time that templates are told; None for the present.
    """

    clock: Clock = field(default_factory=Clock)
    fixed: datetime | None = None

    def now(self) -> datetime:
        """Return the time for a request."""
        return self.fixed or datetime.fromtimestamp(self.clock.now())


def clock_of(settings: Settings) -> TemplateClock:
    """Return what tells templates the time: midnight of the day that `template_date` names, if any.

    It is midnight, and not the time of the start, so that a server that is started again on the
    same day finds the blocks that are on disk.
    """
    present = TemplateClock(Clock(settings.clock_offset_file))
    if settings.template_date is None:
        return present
    is_start = settings.template_date == AT_START
    day = present.now().date() if is_start else date.fromisoformat(settings.template_date)
    return replace(present, fixed=datetime.combine(day, time()))


def tell_if_printed(renders: Iterable[Render], now: datetime, variables: Collection[str]) -> None:
    """Say in the log if a template prints the date or the time, and what can be done.

    Args:
        renders: a function for each conversation that it is tried with.
        now: the present time.
        variables: that the template reads, of which one may take the place of the date.
    """
    for render in renders:
        if _tell(render, now, variables):
            return


def _tell(render: Render, now: datetime, variables: Collection[str]) -> bool:
    """Say what is to be said after a trial with one conversation; return whether it was."""
    try:
        text = render(moment := Moment(now), {})
    except RequestError:  # whoever sends a conversation is told
        return False
    if not moment.told:
        return False
    other_time = now.replace(hour=(now.hour + 13) % 24, minute=(now.minute + 31) % 60)
    other_time = other_time.replace(second=(now.second + 31) % 60)
    found, way_out = "", _WAY_OUT % now.date()
    for later in (other_time, *(now + pause for pause in _LATER)):
        try:
            if render(Moment(later), {}) == text:
                continue
        except RequestError as error:
            if not found:
                what = "the chat template cannot be rendered on %s, though it can now (%s); %s"
                logger.warning(what, later.strftime("%F %T"), error, way_out)
            return True
        found = found or ("the time of day" if later == other_time else "the date")
    if not found:
        return False
    if names := [name for name in sorted(variables) if _replaces(render, now, name)]:
        way_out += f", or give `{names[0]}` in `chat_template_kwargs`"
    what = "the chat template prints %s: when it changes, no block of an earlier prompt is found"
    logger.warning(f"{what} again; %s", found, way_out)
    return True


def _replaces(render: Render, now: datetime, name: str) -> bool:
    """Return whether an argument of this name stands in the place of the time."""
    if "date" not in name.lower():
        return False
    moment = Moment(now)
    try:
        render(moment, {name: "1 January 2025"})
    except RequestError:
        return False
    return not moment.told
