"""Reading the fields of a JSON body, with OpenAI's error texts for what is not as it must be.

It knows types and ranges, not what any field is for. `null` is the same as an absent field.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import msgspec

from tieredkv.errors import RequestError

_TYPE_NAMES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a request's body is.

    Raises:
        RequestError: it is none.
    """
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("We could not parse the JSON body of your request.") from None
    if not isinstance(parsed, dict):
        raise invalid_type("body", "an object", parsed)
    return parsed


def invalid_type(path: str, expected: str, value: object) -> RequestError:
    """Return the error for a value of the wrong JSON type; the body itself is no parameter."""
    got = _TYPE_NAMES.get(type(value), "something else")
    text = f"Invalid type for '{path}': expected {expected}, but got {got} instead."
    return RequestError(text, param=None if path == "body" else path, code="invalid_type")


def invalid(path: str, rest: str, code: str) -> RequestError:
    """Return the error for a value out of bounds; `rest` says what was expected and what came."""
    return RequestError(f"Invalid '{path}': {rest} instead.", param=path, code=code)


def invalid_value(path: str, value: str, supported: Sequence[str]) -> RequestError:
    """Return the error for a string that is not one of those supported."""
    *others, last = [f"'{name}'" for name in supported]
    listed = f"values are: {', '.join(others)} and {last}" if others else f"value is: {last}"
    message = f"Invalid value: '{value}'. Supported {listed}."
    return RequestError(message, param=path, code="invalid_value")


def unknown_parameter(path: str) -> RequestError:
    """Return the error for a field that nobody knows."""
    return RequestError(f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")


def check_items(values: list[Any], kind: type, path: str) -> None:
    """Check that all items of an array are of one JSON type; the field itself is at fault."""
    for i, value in enumerate(values):
        if type(value) is not kind:
            error = invalid_type(f"{path}[{i}]", _TYPE_NAMES[kind], value)
            error.param = path.partition("[")[0]
            raise error


class Fields:
    """The fields of one JSON object; `path` leads to it from the body."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._body = body
        self._path = path
        self._read: set[str] = set()

    @classmethod
    def of(cls, value: object, path: str) -> "Fields":
        """Return the fields of a value that must be an object."""
        if not isinstance(value, dict):
            raise invalid_type(path, "an object", value)
        return cls(value, path)

    def path(self, name: str) -> str:
        """Return where a field stands, as error messages name it."""
        return f"{self._path}.{name}" if self._path else name

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return all fields, unchecked."""
        return self._body.items()

    def raw(self, name: str) -> Any:
        """Return a field unchecked; None where it is absent."""
        self._read.add(name)
        return self._body.get(name)

    def required(self, name: str) -> Any:
        """Return a field that must be there."""
        value = self.raw(name)
        if value is None:
            path = self.path(name)
            message = f"Missing required parameter: '{path}'."
            raise RequestError(message, param=path, code="missing_required_parameter")
        return value

    def integer(
        self, name: str, *, least: int | None = None, most: int | None = None
    ) -> int | None:
        """Return an integer within its range."""
        value: int | None = self._typed(name, int)
        self._check_range(name, value, least, most, "integer")
        return value

    def number(
        self, name: str, *, least: float | None = None, most: float | None = None
    ) -> float | None:
        """Return a number within its range."""
        value = self._typed(name, int, float)
        self._check_range(name, value, least, most, "decimal")
        try:
            return None if value is None else float(value)
        except OverflowError:
            raise invalid_type(self.path(name), "a decimal", value) from None

    def boolean(self, name: str) -> bool:
        """Return a boolean; False where it is absent."""
        return bool(self._typed(name, bool))

    def string(
        self, name: str, *, most: int | None = None, is_required: bool = False
    ) -> str | None:
        """Return a string that is not empty and of at most `most` characters."""
        value: str | None = self._typed(name, str, is_required=is_required)
        if value == "":
            text = "empty string. Expected a string with minimum length 1, but got an empty string"
            raise invalid(self.path(name), text, "empty_string")
        self._check_length(name, value, most, "a string")
        return value

    def choice(
        self, name: str, supported: Sequence[str], *, is_required: bool = False
    ) -> str | None:
        """Return a string that is one of those supported."""
        value: str | None = self._typed(name, str, is_required=is_required)
        if value is not None and value not in supported:
            raise invalid_value(self.path(name), value, supported)
        return value

    def array(
        self, name: str, *, most: int | None = None, is_required: bool = False
    ) -> list[Any] | None:
        """Return an array of at most `most` items; an empty one is refused where it is required."""
        value: list[Any] | None = self._typed(name, list, is_required=is_required)
        if is_required and not value:
            text = "empty array. Expected an array with minimum length 1, but got an empty array"
            raise invalid(self.path(name), text, "empty_array")
        self._check_length(name, value, most, "an array")
        return value

    def object(self, name: str) -> "Fields | None":
        """Return the fields of an object."""
        value = self.raw(name)
        return None if value is None else Fields.of(value, self.path(name))

    def check_known(self, ignored: frozenset[str]) -> None:
        """Refuse fields that nobody has read and that are not to be ignored; the first is named."""
        for name in self._body:
            if name not in self._read | ignored:
                raise unknown_parameter(self.path(name))

    def _typed(self, name: str, *kinds: type, is_required: bool = False) -> Any:
        """Return a field of one of these types, or None; errors name the last of them."""
        value = self.required(name) if is_required else self.raw(name)
        if value is not None and type(value) not in kinds:
            raise invalid_type(self.path(name), _TYPE_NAMES[kinds[-1]], value)
        return value

    def _check_range(
        self, name: str, value: float | None, least: float | None, most: float | None, kind: str
    ) -> None:
        if value is None:
            return
        path = self.path(name)
        if least is not None and value < least:
            text = f"{kind} below minimum value. Expected a value >= {least}, but got {value}"
            raise invalid(path, text, f"{kind}_below_min_value")
        if most is not None and value > most:
            text = f"{kind} above maximum value. Expected a value <= {most}, but got {value}"
            raise invalid(path, text, f"{kind}_above_max_value")

    def _check_length(self, name: str, value: Sized | None, most: int | None, a_kind: str) -> None:
        if value is not None and most is not None and len(value) > most:
            kind = a_kind.split()[1]
            got = f"but got {a_kind} with length {len(value)}"
            text = f"{kind} too long. Expected {a_kind} with maximum length {most}, {got}"
            raise invalid(self.path(name), text, f"{kind}_above_max_length")
