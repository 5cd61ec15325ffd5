"""What all verbs have in common: a call of a verb, as it is sent, and what carries it out."""

from collections.abc import Generator
from typing import Any, ClassVar

import msgspec

from tieredkv.operate.worker import Worker

Page = list[Any]
"""Items of a list, such as `ChainInfo` for `ls`."""

Asking = Generator[Page, None, dict[str, Any]]
"""Yields the pages of an answer, if it has any, and returns the rest of it."""


class Verb(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A call of one verb.

    Unknown fields are refused, as they may be meant to spare blocks. Fields that have their default
    are not sent, so that workers and servers of older versions need not know them.

    Attributes:
        needs_disk: whether it says nothing of VRAM and host memory, so that it is of no use without
            a disk tier.
        listed_as: what the list is called that is its answer, and that may be too long for memory;
            empty for any other answer.
        is_local: whether only the machine's own user may call it, not `/admin`.
        is_quick: whether it only reads a few figures, so that a server can answer it on a thread.
        changes: whether it may change the store; other verbs leave a stopped store as it is.
        needs_engine: whether it must not be carried out while an engine that uses the store cannot
            be asked.
        mends: whether it makes a damaged index again.
        empties: whether it drops every block on disk, which also works on a store that no server
            would start on.
    """

    needs_disk: ClassVar[bool] = False
    listed_as: ClassVar[str] = ""
    is_local: ClassVar[bool] = False
    is_quick: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    needs_engine: ClassVar[bool] = False
    mends: ClassVar[bool] = False
    empties: ClassVar[bool] = False

    @property
    def verb(self) -> str:
        """What the verb is called."""
        return str(self.__struct_config__.tag)

    def check(self) -> None:
        """Refuse a call that says too little, or too much.

        Raises:
            ConfigError: names the field.
        """

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return the answer of a verb that has no list."""
        raise NotImplementedError(f"`{self.verb}` answers with a list")

    def carry_out(self, worker: Worker) -> Asking:
        """Yield the pages of the answer, and return the rest of it.

        If the worker ends too early, the same call is carried out by the next one.
        """
        yield from ()
        return self.answer(worker)
