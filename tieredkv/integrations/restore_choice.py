"""Whether what the disk has of a request's prompt is loaded or computed: numbers in, choice out.

Another engine takes the head of a prompt from a slower tier, or none of it. Computing grows dearer
with each token, so that a head is worth loading in whole or not at all, and the choice is made once
for a request. Whatever is not known speaks for computing: what is computed takes no longer than
without the disk.
"""

from typing import Literal

import msgspec

from tieredkv.cache.plan import Demand, LinkLoad, LinkState, Planner, outlook
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.config import Restore

Reason = Literal["setting", "faster", "slower", "unknown_prefill", "unknown_disk"]

ANY_LENGTH = 1 << 40
"""How a prompt is cut into steps is the engine's matter; the times of whole prompts tell it."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a choice follows from.

    Attributes:
        restore: the operator's setting.
        chunk_tokens: tokens of a chunk.
        begin: the tokens before it are in the engine's own memory; a multiple of `chunk_tokens`.
        end: behind the last token of the chunks that follow without a gap; a multiple as well.
        num_tokens: of the request, as far as they are known; at least `end`.
        load_bytes: what has to be read for these tokens.
        read_bytes_per_s: how fast the disk reads; None if it was never measured.
        read_busy_s: for how long the disk is busy with reads that it was given before.
        copy_bytes_per_s: how fast the engine copies from its host memory to its device.
        protocol_s: what else passes from the last byte until the engine goes on with the request.
        times: how long the engine takes to compute tokens; None if that is not known.
    """

    restore: Restore
    chunk_tokens: int
    begin: int
    end: int
    num_tokens: int
    load_bytes: int
    read_bytes_per_s: float | None
    read_busy_s: float
    copy_bytes_per_s: float
    protocol_s: float
    times: StepTimes | None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with a head, and why.

    Attributes:
        should_load: whether it is loaded.
        reason: `setting` if the operator said so; else which of the two is faster, or what is not
            known yet.
        compute_s: seconds until the request's tokens are computed if all of them are.
        load_s: the same if the head is loaded first.
        arrival_s: seconds until the engine goes on with the request if the head is loaded.
        least_gain_s: what loading has to save.

    All seconds are 0.0 while something is not known.
    """

    should_load: bool
    reason: Reason
    compute_s: float = 0.0
    load_s: float = 0.0
    arrival_s: float = 0.0
    least_gain_s: float = 0.0


class LoggedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice and all that it follows from, as one line of JSON."""

    request: str
    facts: Facts
    choice: Choice

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


def replay(text: str) -> tuple[LoggedChoice, Choice]:
    """Make a logged choice again.

    Args:
        text: the JSON of the line.

    Returns:
        What was logged, and what is chosen now.

    Raises:
        ValueError: the text is no logged choice.
    """
    logged = msgspec.json.decode(text, type=LoggedChoice)
    return logged, choose(logged.facts)


def choose(facts: Facts) -> Choice:
    """Choose between loading and computing a head.

    Without an order of the operator's it is loaded if the planner expects that to save as much as
    it demands of any load from a link whose rate varies.
    """
    choice = _expected(facts)
    if facts.restore == "auto":
        return choice
    return msgspec.structs.replace(choice, should_load=facts.restore == "load", reason="setting")


def _expected(facts: Facts) -> Choice:
    if facts.times is None:
        return Choice(should_load=False, reason="unknown_prefill")
    if facts.read_bytes_per_s is None:
        return Choice(should_load=False, reason="unknown_disk")
    first, last = facts.begin // facts.chunk_tokens, facts.end // facts.chunk_tokens
    latency_s = facts.load_bytes / facts.copy_bytes_per_s + facts.protocol_s
    block_bytes = -(-facts.load_bytes // (last - first))
    link = LinkState(facts.read_bytes_per_s, block_bytes, facts.read_busy_s, latency_s)
    planner = Planner([link], PromptTimes(facts.times, ANY_LENGTH), block_size=facts.chunk_tokens)
    num_tokens = max(facts.num_tokens, facts.end + 1)  # the last one is always computed
    demand = Demand(facts.begin, num_tokens, [LinkLoad(0, range(first, last))])
    least_gain_s = planner.least_gain_s(demand)
    _, compute_s, load_s = outlook(planner, facts.end, num_tokens, begin=facts.begin)
    should_load = compute_s - load_s > least_gain_s
    return Choice(
        should_load=should_load,
        reason="faster" if should_load else "slower",
        compute_s=compute_s,
        load_s=load_s,
        arrival_s=link.busy_s + facts.load_bytes / link.bytes_per_s + latency_s,
        least_gain_s=least_gain_s,
    )
