"""`rotate`: another master key."""

from typing import Any, ClassVar

from tieredkv.errors import ConfigError
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages import operator as messages


class Rotate(Verb, frozen=True, kw_only=True, tag="rotate"):
    """Replace the master key of an encrypted store.

    Attributes:
        master_key: path of a file with the new key, which is made if it does not exist.
        command: prints the new key. Without either, a new key takes the old one's place.
    """

    needs_disk: ClassVar[bool] = True
    is_local: ClassVar[bool] = True  # it reads files and runs a command
    changes: ClassVar[bool] = True

    master_key: str | None = None
    command: str | None = None

    def check(self) -> None:
        """Refuse two places."""
        if self.master_key is not None and self.command is not None:
            raise ConfigError("give either `master_key` or `command`")

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return `{"master_key", "keys"}`: where the new key is, and how many keys it wraps."""
        asked = messages.Rotate(master_key=self.master_key, command=self.command)
        done = worker.one(asked, messages.Rotated)
        return {"master_key": done.master_key, "keys": done.keys}
