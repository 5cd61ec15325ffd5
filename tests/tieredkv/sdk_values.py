"""Values of the types with which the APIs' own clients describe a request.

These types name every kind of item, block and tool that an API has, and all of their fields.
"""

import collections.abc
from collections.abc import Iterator
from typing import Any, Union

import typing_extensions as typing

REQUIRED: Any = typing.Required
MAX_DEPTH = 6
MAX_LITERALS = 3
PLAIN = {str: "word", bool: True, int: 1, float: 0.5, object: {"a": "deep"}}
LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


def kinds_of(union: Any) -> list[Any]:
    """Return the types of objects in a union."""
    return [each for each in typing.get_args(union) if typing.is_typeddict(each)]


def values(hint: Any, *, is_full: bool, depth: int = 0) -> Iterator[Any]:
    """Yield values of a type, so that every kind of what it holds is in one of them.

    Args:
        hint: the type.
        is_full: whether objects have all of their fields, instead of those that they need.
        depth: how deep in the request the value is.
    """
    while (origin := typing.get_origin(hint)) in (REQUIRED, typing.Annotated):
        hint = typing.get_args(hint)[0]
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    if typing.is_typeddict(hint):
        yield from _objects(hint, is_full=is_full, depth=depth)
    elif origin is typing.Literal:
        yield from inner[:MAX_LITERALS]
    elif origin is Union:
        for each in inner:
            yield from values(each, is_full=is_full, depth=depth)
    elif origin in LISTS or "SequenceNotStr" in str(hint):
        each = inner[0] if inner else str
        yield [*values(each, is_full=is_full, depth=depth + 1)]
    elif origin in (dict, collections.abc.Mapping):
        yield {"key": next(values(inner[1], is_full=is_full, depth=depth + 1))}
    elif hint in PLAIN:
        yield PLAIN[hint]


def _objects(hint: Any, *, is_full: bool, depth: int) -> Iterator[dict[str, Any]]:
    fields = dict[str, list[Any]]()
    for name, each in typing.get_type_hints(hint, include_extras=True).items():
        is_needed = typing.get_origin(each) is REQUIRED
        if depth < MAX_DEPTH and (is_full or is_needed):
            fields[name] = [*values(each, is_full=is_full, depth=depth + 1)]
    fields = {name: each for name, each in fields.items() if each}
    most = max(map(len, fields.values()), default=1) if depth < 2 else 1
    for i in range(most):
        yield {name: each[i % len(each)] for name, each in fields.items()}
