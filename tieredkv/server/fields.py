"""JSON bodies to checked objects, with OpenAI's error texts for what is not as it must be.

It knows types and ranges, not what any field is for. `null` is the same as an absent field.
"""

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tieredkv.errors import RequestError

_GOT = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
_EXPECTED = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a decimal",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "a string",
}
"""What was expected, by pydantic's type of error; other types say it themselves."""

_OUT_OF_BOUNDS = {
    "greater_than_equal": (
        "{number}_below_min_value",
        "{number} below minimum value. Expected a value >= {bound}, but got {value}",
    ),
    "less_than_equal": (
        "{number}_above_max_value",
        "{number} above maximum value. Expected a value <= {bound}, but got {value}",
    ),
    "string_too_short": (
        "empty_string",
        "empty string. Expected a string with minimum length {bound}, but got an empty string",
    ),
    "too_short": (
        "empty_array",
        "empty array. Expected an array with minimum length {bound}, but got an empty array",
    ),
    "string_too_long": (
        "string_above_max_length",
        "string too long. Expected a string with maximum length {bound}, but got a string with "
        "length {length}",
    ),
    "too_long": (
        "array_above_max_length",
        "array too long. Expected an array with maximum length {bound}, but got an array with "
        "length {length}",
    ),
}
"""Code and text, by pydantic's type of error."""


class Object(BaseModel):
    """A JSON object with known fields; others are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {name: each for name, each in value.items() if each is not None or name not in known}


Body = TypeVar("Body", bound=Object)


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
        raise RequestError(_wrong_type("body", "an object", parsed), code="invalid_type")
    return parsed


def read(kind: type[Body], body: dict[str, Any]) -> Body:
    """Return a body with each of its fields checked.

    Raises:
        RequestError: the first field that is not as it must be, in OpenAI's words.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _in_openai_words(error.errors(include_url=False)[0]) from None


def invalid_value(path: str, value: str, supported: str) -> RequestError:
    """Return the error for a string that is not one of those supported, as `'a', 'b' and 'c'`."""
    listed = f"values are: {supported}" if " and " in supported else f"value is: {supported}"
    message = f"Invalid value: '{value}'. Supported {listed}."
    return RequestError(message, param=path, code="invalid_value")


def unknown_parameter(path: str) -> RequestError:
    """Return the error for a field that nobody knows."""
    return RequestError(f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")


def _wrong_type(path: str, expected: str, value: object) -> str:
    got = _GOT.get(type(value), "something else")
    return f"Invalid type for '{path}': expected {expected}, but got {got} instead."


def _in_openai_words(error: Any) -> RequestError:
    """Return one of pydantic's errors in OpenAI's words, naming the field."""
    kind, where, value, facts = (error.get(key, {}) for key in ("type", "loc", "input", "ctx"))
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)[1:]
    if kind == "missing":
        text = f"Missing required parameter: '{path}'."
        return RequestError(text, param=path, code="missing_required_parameter")
    if kind == "literal_error" and isinstance(value, str):
        return invalid_value(path, value, facts["expected"].replace(" or ", " and "))
    if kind in _OUT_OF_BOUNDS:
        bound = next(
            facts[name] for name in ("ge", "le", "min_length", "max_length") if name in facts
        )
        number = "decimal" if isinstance(bound, float) else "integer"
        length = None if isinstance(value, int | float) else len(value)
        told = {"number": number, "bound": int(bound), "value": value, "length": length}
        code, text = (part.format(**told) for part in _OUT_OF_BOUNDS[kind])
        return RequestError(f"Invalid '{path}': {text} instead.", param=path, code=code)
    expected = _EXPECTED.get(kind, error["msg"])
    is_plain_item = isinstance(where[-1], int) and expected != "an object"
    param = path.partition("[")[0] if is_plain_item else path  # the array is at fault
    return RequestError(_wrong_type(path, expected, value), param=param, code="invalid_type")
