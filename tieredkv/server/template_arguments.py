"""Arguments for the chat template that clients name, in `chat_template_kwargs` of each API."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from tieredkv.errors import MAX_TOLD_CHARACTERS, RequestError
from tieredkv.fields import wrong_type
from tieredkv.server.chat_template import RESERVED, ChatTemplate

FIELD = "chat_template_kwargs"


def _of_client(arguments: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if name in RESERVED:
            way_out = " Only variables of the model's own template can be set."
            raise PydanticCustomError("unsupported", "nothing", {"name": name, "way_out": way_out})
        if not isinstance(value, str | int | float | bool):
            what = "a string, a number or a boolean"
            raise PydanticCustomError("template_variable", what, {"name": name, "value": value})
    return given


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_of_client)]
"""Names of a template's variables and their values; a name whose value is `null` is left out."""


def check_arguments(arguments: Mapping[str, Any], template: ChatTemplate) -> None:
    """Refuse arguments without an effect.

    Args:
        arguments: of a client.
        template: that is to read them.

    Raises:
        RequestError: the template does not read one of them, or only asks if it is true or false,
            and it is neither.
    """
    for name, value in arguments.items():
        path = f"{FIELD}.{name[:MAX_TOLD_CHARACTERS]}"
        if name not in template.arguments:
            others = (it for it in template.arguments if not it.endswith("_token"))
            known = ", ".join(f"'{it}'" for it in sorted(others))
            what = f"'{path}' is not supported. The chat template of this model does not read it"
            text = f"{what}; it reads {known}." if known else f"{what}, and takes no arguments."
            raise RequestError(text, param=path, code="unsupported_parameter")
        if name in template.switches and not isinstance(value, bool):
            text = wrong_type(path, "a boolean", value)
            raise RequestError(text, param=path, code="invalid_type")
