"""What vLLM's HTTP application tells of itself: endpoints, keys and the tier's arguments.

It is read from outside, without an import of vLLM. An application without endpoints of vLLM is
another server's.
"""

import inspect
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from tieredkv.config import Settings, load_settings
from tieredkv.errors import ConfigError
from tieredkv.integrations.vllm_bodies import PARAMS, SALT, Endpoint
from tieredkv.integrations.vllm_settings import tiers_in

KNOWN_TO_WORK = "0.26 and 0.33"
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_SEVERAL = "/invocations"  # SageMaker's; its body is one of chat completions or of completions
_WRITTEN = frozenset({PARAMS, SALT})


class Guard(NamedTuple):
    """vLLM's own check of API keys, and how many there are."""

    middleware: Any
    num_keys: int

    def before(self, app: Any) -> Any:
        """Return the check in front of an application."""
        held = self.middleware
        return held.cls(app, *held.args, **held.kwargs)


def endpoints_of(app: Any) -> dict[str, Endpoint] | None:
    """Return the endpoints whose bodies are to be rewritten, by path; None if it is not vLLM.

    These are all that have room for the fields. Endpoints that only render a prompt are left out.

    Raises:
        ConfigError: a generating endpoint of this version of vLLM cannot be read.
    """
    found, paths, takes_several = dict[str, Endpoint](), set[str](), False
    for route in getattr(app, "routes", ()):
        endpoint, path = getattr(route, "endpoint", None), getattr(route, "path", "")
        if endpoint is None or "POST" not in (getattr(route, "methods", None) or ()):
            continue
        takes_several |= path == _SEVERAL  # a wrapper that is not vLLM's
        if not getattr(inspect.unwrap(endpoint), "__module__", "").startswith("vllm."):
            continue
        paths.add(path)
        if (fields := _fields(endpoint)) and not path.endswith("/render"):
            found[path] = Endpoint(fields, is_anthropic=path == "/v1/messages")
    if paths and takes_several:
        found[_SEVERAL] = Endpoint(_WRITTEN, is_open=True)
    is_vllm = paths or hasattr(_arguments(app), "kv_transfer_config")
    missing = [path for path in _GENERATING if path in paths and path not in found]
    if is_vllm and (missing or not paths):
        raise ConfigError(
            f"this version of vLLM takes neither `{SALT}` nor `{PARAMS}` on "
            f"{missing[0] if missing else 'any endpoint'}, as far as its middleware can see; vLLM "
            f"{KNOWN_TO_WORK} are known to work"
        )
    return found if paths else None


def _fields(endpoint: Any) -> frozenset[str]:
    """Return which of the fields every type of an endpoint's body has.

    A batch has them by passing on what it does not know to each of its requests.
    """
    try:
        annotations = inspect.get_annotations(inspect.unwrap(endpoint), eval_str=True)
    except (NameError, AttributeError, TypeError):  # a type that is imported for checks only
        return frozenset()
    models = [each for kind in annotations.values() for each in _types(kind)]
    names = [_names(each) & _WRITTEN for each in models if hasattr(each, "model_fields")]
    return frozenset.intersection(*names) if names else frozenset()


def _names(model: Any) -> frozenset[str]:
    names = frozenset(model.model_fields)
    passes_on = SALT in names and model.model_config.get("extra") == "allow"
    return names | {PARAMS} if passes_on else names


def _types(kind: Any) -> Iterator[Any]:
    """Yield the types in an annotation, such as those of a union."""
    if typing.get_origin(kind) is None:
        yield kind
    for each in typing.get_args(kind):
        yield from _types(each)


def guard_of(app: Any) -> Guard | None:
    """Return vLLM's own check of API keys; None if it has no keys."""
    for each in getattr(app, "user_middleware", ()):
        if each.cls.__module__.startswith("vllm.") and "Authentication" in each.cls.__name__:
            return Guard(each, len(each.kwargs.get("tokens", ())))
    return None


def settings_of(app: Any) -> tuple[Settings, bool]:
    """Return the settings of the tier in an application's arguments, and whether it has the tier.

    What the environment says in `TIEREDKV_*` counts where the tier's arguments say nothing. An
    application that does not tell its arguments counts as one with the tier.

    Raises:
        ConfigError: a setting is malformed.
    """
    arguments = _arguments(app)
    tiers = tiers_in(getattr(arguments, "kv_transfer_config", None))
    told = tiers[0] if tiers else {}
    chosen = {"default_retention": told.get("default_retention")}
    settings = load_settings(arguments=chosen, config_path=told.get("config_file")).settings
    settings.check_server()
    return settings, bool(tiers) or arguments is None


def _arguments(app: Any) -> Any:
    """Return the arguments of vLLM's command line; None if the application does not tell them."""
    return getattr(getattr(app, "state", None), "args", None)
