"""The record of one block, as the index and the headers of extents hold it."""

from collections.abc import Iterable, Sequence

from tieredkv.errors import StorageError

_NO_NAME = 255  # the number of a name that is not in the list
_MOST_NAME_BYTES = 32


class Retentions:
    """The names of retention policies by their numbers, which the records of a store have.

    Args:
        names: the list of the store.

    Attributes:
        names: the same.

    Raises:
        StorageError: there are more than 255 names, or one is too long.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._numbers = {"": _NO_NAME}
        for number, name in enumerate(self.names):
            self._numbers.setdefault(name, number)
        self._names = dict(enumerate(self.names))
        if len(self.names) > _NO_NAME:
            what = f"a store knows at most {_NO_NAME} names of retention policies"
            raise StorageError(f"{what}, but {len(self.names)} are wanted; choose another folder")
        for name in self.names:
            if len(name.encode(errors="surrogatepass")) > _MOST_NAME_BYTES:
                what = f"retention name `{name}` is longer than {_MOST_NAME_BYTES} bytes"
                raise StorageError(f"{what}; choose a shorter one")

    def with_new(self, names: Iterable[str]) -> "Retentions":
        """Return the list with those names at its end that it lacks."""
        new = dict.fromkeys(name for name in names if name not in self._numbers)
        return Retentions((*self.names, *new)) if new else self

    def name_of(self, number: int) -> str:
        """Return the name of a number; it is empty where the list has none."""
        return self._names.get(number, "")

    def number_of(self, name: str) -> int:
        """Return the number of a name; the empty name has one that no list has.

        Raises:
            StorageError: the list lacks the name.
        """
        if (number := self._numbers.get(name)) is None:
            known = ", ".join(f"`{each}`" for each in self.names) or "none"
            raise StorageError(f"retention `{name}` may not use the disk; those that may: {known}")
        return number
