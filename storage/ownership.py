"""Which thread may call what in the worker: an assertion, since objects are shared without locks.

It costs a third of a microsecond a call, so it is always on. A call from a wrong thread would
damage what is kept in memory, and would be found much later; now it fails at once.
"""

import functools
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from tieredkv.errors import IntegrityError

Params = ParamSpec("Params")
Result = TypeVar("Result")


class OwningThread:
    """The one thread that may make some calls; until a thread owns them, every thread may."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def own(self) -> None:
        """Let only the calling thread make these calls from now on."""
        self._ident = threading.get_ident()

    def disown(self) -> None:
        """Let every thread make these calls, since the one that owned them ends."""
        self._ident = None

    def owns(self) -> bool:
        """Return whether the calling thread may make these calls."""
        return self._ident is None or self._ident == threading.get_ident()


def owned_by(path: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Let a method be called only by the thread that owns it; a generator is checked when made.

    Args:
        path: where the object has what says so by `owns()`, such as `mover.loop`.
    """
    find = attrgetter(path)

    def decorate(method: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(method)
        def checked(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            if not find(args[0]).owns():
                name, thread = method.__qualname__, threading.current_thread().name
                raise IntegrityError(f"`{name}` is called by the thread `{thread}`")
            return method(*args, **kwargs)

        marked: Any = checked
        marked.owned_by = path
        return checked

    return decorate
