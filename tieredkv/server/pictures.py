"""Take the data of pictures and other files out of bodies that are long because of them.

A model that reads text only is given a short note for each picture, so that its data say nothing.
This module knows where the APIs put such data, and no other field.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tieredkv.fields import names_of, parse_body
from tieredkv.server.limits import check_rest
from tieredkv.server.threads import Cancellation

_HAVE_DATA = names_of("""
    base64 computer_screenshot document file image image_generation_call image_url input_audio
    input_file input_image
""")
"""Types of the parts, items and sources whose data nobody reads."""

_URLS = ("image_url", "url")


def without_pictures(body: bytes, max_values: int, most: int, cancellation: Cancellation) -> bytes:
    """Return a body without the data of its pictures, files and recordings, as shorter JSON.

    The prompt is the same as with them.

    Args:
        body: a JSON object.
        max_values: how many values it may hold.
        most: how many bytes it may have beside these data.
        cancellation: is set once the result is no longer wanted.

    Raises:
        RequestError: the rest is too long, or it is no JSON object, or holds too much.
        CancelledWorkError: the result is no longer wanted.
    """
    parsed, num_taken = parse_body(body, max_values), 0
    cancellation.check()
    escaped = "\n\r/" if b"\\/" in body else "\n\r"  # as far as base64 has them
    for holder, name in _places(parsed):
        data = holder.pop(name)
        num_taken += len(data) + sum(map(data.count, escaped))
    check_rest(len(body) - num_taken, most)
    return msgspec.json.encode(parsed)


def _places(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where the data are: an object and the name of its field."""
    waiting = [body.get("messages"), body.get("input")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += (part.get(name) for name in ("content", "output", "source"))
            if isinstance(kind := part.get("type"), str) and kind in _HAVE_DATA:
                yield from _data_of(part, kind)


def _data_of(part: dict[str, Any], kind: str) -> Iterator[tuple[dict[str, Any], str]]:
    for holder, name in (
        (part, "image_url"),
        (part.get("image_url"), "url"),
        (part, "file_data"),
        (part.get("file"), "file_data"),
        (part.get("input_audio"), "data"),
        *(((part, "data"),) if kind == "base64" else ()),
        *(((part, "result"),) if kind == "image_generation_call" else ()),
    ):
        data = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(data, str) and (name not in _URLS or data.startswith("data:")):
            yield holder, name
