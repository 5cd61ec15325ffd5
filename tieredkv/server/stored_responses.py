"""Responses that clients may ask for again or continue, in memory, for an hour and within a bound.

What is kept are JSON texts: the response, and the items of the conversation up to its end. Nothing
is written to a disk. This module knows tenants and bytes, but neither HTTP nor what an item means.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tieredkv.errors import MAX_TOLD_CHARACTERS, IntegrityError, RequestError
from tieredkv.server.tenant_store import TenantStore

LIFETIME_S = 3600.0
RESPONSE_ID = "resp_"
"""What the id of a response begins with."""

ENTRY_BYTES = 1024
"""What a response is taken to need beside its texts, so that many short ones are bounded, too."""


class _Item(msgspec.Struct):
    """The id of an item."""

    id: str


class _Body(msgspec.Struct):
    """The items of a response, each as JSON."""

    output: list[msgspec.Raw]


_ITEM, _BODY = msgspec.json.Decoder(_Item), msgspec.json.Decoder(_Body)


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item of a response, by which the response can be found."""
    return f"{kind}_{response_id.partition('_')[2]}_{index}"


def _response_of(item_id: str) -> str:
    _, of_response, *_ = (*item_id.split("_"), "")
    return f"{RESPONSE_ID}{of_response}"


@dataclass(slots=True, eq=False)
class Turn:
    """What one request and its answer added to a conversation.

    Responses that continue the same conversation share its turns.

    Attributes:
        items: JSON objects with commas between them; at least one.
        before: the turn before it; None for the first.
        num_bytes: the length of the conversation up to its end.
        num_holders: how many stored responses and later turns hold it.
    """

    items: bytes
    before: "Turn | None" = None
    num_bytes: int = 0
    num_holders: int = 0

    def __post_init__(self) -> None:
        self.num_bytes = len(self.items) + (self.before.num_bytes if self.before else 0)

    def answered(self, items: bytes) -> "Turn":
        """Return the turn with the items of its answer, of which there may be none."""
        return Turn(self.items + b"," + items if items else self.items, self.before)

    def chain(self) -> "Iterator[Turn]":
        """Yield this turn and those before it, the latest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before

    def conversation(self) -> bytes:
        """Return the items of the conversation as a JSON array."""
        return b"[%b]" % b",".join([turn.items for turn in self.chain()][::-1])


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response.

    Attributes:
        body: the response as JSON.
        turn: the last turn of its conversation.
        namespace: the digest of the namespace that its request's blocks are in.
        stored_at, used_at: seconds since the epoch, when it was stored and last asked for.
    """

    body: bytes
    turn: Turn
    namespace: bytes
    stored_at: float = 0.0
    used_at: float = 0.0


class StoredResponses(TenantStore[str, StoredResponse]):
    """The stored responses of all tenants; any thread may call it.

    Where there is no room for another response, the oldest one of the tenant with the most bytes
    goes.

    Invariants, which `check` verifies:
        - Every turn of a stored conversation has as many holders as it says.
        - A tenant's bytes are those of its responses and of their turns, each counted once.
        - All tenants together hold at most `max_bytes`, and none of them holds nothing.
    """

    def add(self, tenant: str, id: str, response: StoredResponse) -> None:
        """Store a response under its id, if it fits at all."""
        with self._lock:
            self._expire()
            response.stored_at = response.used_at = self._now()
            self._put(tenant, id, response)

    def get(self, tenant: str, id: str, field: str | None = None) -> StoredResponse:
        """Return one of the tenant's responses.

        Args:
            tenant: that asks.
            id: of the response.
            field: of a request's body that names it; None if its path does.

        Raises:
            RequestError: the tenant has no such response, or no longer.
        """
        with self._lock:
            self._expire()
            response = self._of.get(tenant, {}).get(id)
            if response is not None:
                response.used_at = self._now()
                return response
        raise self._not_found(id, field)

    def items(self, tenant: str, ids: Sequence[str]) -> dict[str, bytes]:
        """Return items of the tenant's responses as JSON, by their ids.

        Raises:
            RequestError: one of them is not there, or no longer.
        """
        found = dict[str, bytes]()
        for response_id in {_response_of(id) for id in ids}:
            with contextlib.suppress(RequestError):
                body = _BODY.decode(self.get(tenant, response_id).body)
                found |= {_ITEM.decode(item).id: bytes(item) for item in body.output}
        for id in ids:
            if id not in found:
                what = f"Item with id '{id[:MAX_TOLD_CHARACTERS]}' not found. {self._why_not}"
                raise RequestError(f"{what} Send the item itself.", param="input", status=404)
        return {id: found[id] for id in ids}

    def input_items(self, tenant: str, id: str) -> list[dict[str, Any]]:
        """Return the items of a conversation up to one of the tenant's responses, without its own.

        Raises:
            RequestError: the tenant has no such response, or no longer.
        """
        stored = self.get(tenant, id)
        num_own = len(_BODY.decode(stored.body).output)
        items: list[dict[str, Any]] = msgspec.json.decode(stored.turn.conversation())
        return items[: len(items) - num_own]

    def delete(self, tenant: str, id: str) -> None:
        """Drop one of the tenant's responses.

        Responses that continue it keep the turns of their conversation.

        Raises:
            RequestError: the tenant has no such response, or no longer.
        """
        with self._lock:
            self._expire()
            if self._drop(tenant, id):
                return
        raise self._not_found(id)

    def expire(self) -> None:
        """Drop the responses whose time is over."""
        with self._lock:
            self._expire()

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            IntegrityError: one of them is broken.
        """
        with self._lock:
            for tenant, responses in self._of.items():
                last = [each.turn for each in responses.values()]
                turns = {turn for each in last for turn in each.chain()}
                holders = Counter([*last, *(turn.before for turn in turns if turn.before)])
                if any(turn.num_holders != holders[turn] for turn in turns):
                    raise IntegrityError("a turn has other holders than it says")
                size = sum(ENTRY_BYTES + len(each.body) for each in responses.values())
                size += sum(len(turn.items) for turn in turns)
                if not responses or size != self._bytes[tenant]:
                    raise IntegrityError(f"{size} bytes are held as {self._bytes[tenant]}")
            if self._bytes.total() > self._max_bytes or self._bytes.keys() != self._of.keys():
                raise IntegrityError(f"{self._bytes.total()} of {self._max_bytes} bytes are held")

    def _not_found(self, id: str, field: str | None = None) -> RequestError:
        what = f"with id '{id[:MAX_TOLD_CHARACTERS]}' not found."
        if field is None:
            return RequestError(f"Response {what} {self._why_not}", status=404)
        text = f"Previous response {what} {self._why_not} Send the whole conversation in 'input'."
        return RequestError(text, param=field, code="previous_response_not_found", status=404)

    @property
    def _why_not(self) -> str:
        if not self._max_bytes:
            return "This server stores no responses, since `stored_responses_size` is 0."
        return "Responses are kept in memory for an hour, while there is room, and until a restart."

    def _expire(self) -> None:
        end = self._now() - LIFETIME_S
        for tenant in [*self._of]:
            while (responses := self._of.get(tenant)) is not None:
                oldest = next(iter(responses))
                if responses[oldest].stored_at > end:
                    break
                self._drop(tenant, oldest)

    def _hold(self, _tenant: str, _id: str, response: StoredResponse) -> int:
        num_bytes = ENTRY_BYTES + len(response.body)
        for turn in response.turn.chain():
            turn.num_holders += 1
            if turn.num_holders > 1:
                break
            num_bytes += len(turn.items)
        return num_bytes

    def _release(self, _tenant: str, _id: str, response: StoredResponse) -> int:
        num_bytes = ENTRY_BYTES + len(response.body)
        for turn in response.turn.chain():
            turn.num_holders -= 1
            if turn.num_holders:
                break
            num_bytes += len(turn.items)
        return num_bytes
