"""`names_key`: what hides the names of blocks; for a command line that has tokenized a prompt."""

from typing import Any, ClassVar

from tieredkv.errors import MissingKeyError
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages.operator import Figures, StoreFigures


class NamesKey(Verb, frozen=True, kw_only=True, tag="names_key"):
    """The key of the names by which the store knows blocks, empty if it is not encrypted."""

    needs_disk: ClassVar[bool] = True
    is_local: ClassVar[bool] = True

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return `{"names_key"}`.

        Raises:
            MissingKeyError: the store is encrypted, and its keys are not there.
        """
        told = worker.one(Figures(names_key=True), StoreFigures)
        if told.lacks_keys:
            raise MissingKeyError(told.lacks_keys)
        return {"names_key": told.names_key}
