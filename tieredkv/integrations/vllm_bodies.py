"""Bodies of requests to vLLM, rewritten so that retention and tenant reach the tier.

    prompt_cache_retention  ┐
    cache_control.ttl       ├─►  kv_transfer_params.tieredkv = {retention, pin_s, tenant}
    tenant of the API key   ┤
    cache_salt of the client┴─►  cache_salt, a digest that only this tenant gets

What a client sends in `kv_transfer_params.tieredkv` itself is removed. Its `cache_salt` never
reaches vLLM as it is: it narrows the tenant's namespace, as on tieredkv's own server. All other
fields stay as they are, byte for byte.

This module knows JSON and names of fields. It does not know HTTP, routes or vLLM.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.prefixes import namespace_of
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import MAX_TOLD_CHARACTERS, RequestError
from tieredkv.hashing import namespace_digest
from tieredkv.server.asked import Rules
from tieredkv.units import parse_duration

PARAMS = "kv_transfer_params"
SALT = "cache_salt"
KEY = "prompt_cache_key"
RETENTION = "prompt_cache_retention"
WORD = "tieredkv"

_OF_VLLM = ("in_memory", "in-memory", "24h")
"""The words that vLLM's own request types allow in `prompt_cache_retention`."""

_TTLS = ("5m", "1h")
_MARK = "cache_control"

Raw = msgspec.Raw
Body = dict[str, Raw]
_NULL = Raw(b"null")
_DECODER = msgspec.json.Decoder(Body)


class Tenant(NamedTuple):
    """Whose request it is.

    Attributes:
        name: the digest of the key; empty where tenants are not kept apart.
        key: the key itself, which makes the tenant's salts impossible to guess.
    """

    name: str
    key: bytes


class Endpoint(NamedTuple):
    """What the request type of an endpoint has room for.

    Attributes:
        fields: names of its fields.
        is_anthropic: whether retention is asked for by `cache_control`, and errors have
            Anthropic's form.
        is_open: whether the endpoint takes several types, so that only those fields are set which
            a prompt of this kind has.
    """

    fields: frozenset[str]
    is_anthropic: bool = False
    is_open: bool = False


@dataclass(frozen=True)
class Rewriter:
    """Rewrites bodies by the settings of a server.

    Attributes:
        settings: what keeps tenants apart.
        has_tier: whether vLLM has our tier; without it, `kv_transfer_params` are not added.
    """

    settings: Settings
    has_tier: bool

    def rewrite(self, content: bytes, endpoint: Endpoint, tenant: Tenant, rules: Rules) -> bytes:
        """Return the body that vLLM gets; what is no JSON object is returned as it is.

        Raises:
            RequestError: a field that is mapped here has a value that makes no sense.
        """
        if (body := _read(content)) is None:
            return content
        fields = endpoint.fields
        if endpoint.is_open and not body.keys() & {"messages", "prompt"}:
            fields = fields & body.keys()
        if SALT in fields:
            self._set_salt(body, tenant)
        else:
            body.pop(SALT, None)
        is_told = PARAMS in fields and self.has_tier
        _set_params(body, self._told(body, endpoint, tenant, rules) if is_told else None)
        try:
            return msgspec.json.encode(body)
        except UnicodeEncodeError:
            raise RequestError("We could not parse the JSON body of your request.") from None

    def _set_salt(self, body: Body, tenant: Tenant) -> None:
        """Salt a request so that it shares blocks within its namespace only."""
        settings = self.settings
        asked = EngineRequest(
            params=SamplingParams(),
            tenant=tenant.name,
            cache_salt=_text(body, SALT),
            prompt_cache_key=_text(body, KEY) if settings.isolate_by == KEY else None,
        )
        namespace = namespace_of(asked, settings)
        body.pop(SALT, None)
        if namespace != namespace_digest("", algo=settings.hash_algo):
            salt = hmac.new(tenant.key, namespace, hashlib.sha256).hexdigest()
            body[SALT] = Raw(msgspec.json.encode(salt))

    def _told(self, body: Body, endpoint: Endpoint, tenant: Tenant, rules: Rules) -> dict[str, Any]:
        """Return what the tier is told of a request."""
        told: dict[str, Any] = {"tenant": tenant.name} if tenant.name else {}
        retention, pin_s = (_of_marks if endpoint.is_anthropic else _of_word)(body, rules)
        if retention is None and (rules.max_retention or self.settings.max_retention):
            retention = rules.default.name
        if retention is not None:
            told["retention"] = retention
        if pin_s:
            told["pin_s"] = pin_s
        return told


def _of_word(body: Body, rules: Rules) -> tuple[str | None, float]:
    """Return the policy that `prompt_cache_retention` names.

    A policy of the operator's own is taken out of the body, as vLLM's types do not know it.
    """
    if (name := _text(body, RETENTION)) is None:
        return None, 0.0
    rules.check_retention(name)
    if name not in _OF_VLLM:
        del body[RETENTION]
    return rules.policies.get(name).name, 0.0


def _of_marks(body: Body, rules: Rules) -> tuple[str | None, float]:
    """Return the longest policy of a request's breakpoints and of the default, and the pin.

    vLLM takes one retention for a request, so that what lies behind the last mark gets it, too.
    """
    found = dict[str, str]()  # paths by ttl
    for path, ttl in _marks(body):
        if ttl not in _TTLS:
            told = f"{ttl!r}"[:MAX_TOLD_CHARACTERS]
            raise RequestError(f"{path}.{_MARK}.ttl: Input should be '5m' or '1h', but is {told}")
        found.setdefault(ttl, path)
    for ttl, path in found.items():
        if ttl not in rules.policies.names:
            raise RequestError(f"{path}.{_MARK}.ttl: '{ttl}' is not available on this server")
    if not found:
        return None, 0.0
    all_policies = rules.settings.retention_policies()
    return all_policies.longest({rules.default.name, *found}), max(map(parse_duration, found))


def _marks(body: Body) -> Iterator[tuple[str, Any]]:
    """Yield the path and the ttl of each breakpoint of a request, wherever Anthropic allows one."""
    places: list[tuple[str, Any]] = []
    if _MARK in body:
        places.append(("", {_MARK: _value(body[_MARK])}))
    for name in ("tools", "system", "messages"):
        raw = body.get(name, _NULL)
        if _MARK.encode() not in bytes(raw) or not isinstance(held := _value(raw), list):
            continue
        for at, each in enumerate(held):
            places.append((f"{name}.{at}", each))
            content = each.get("content") if name == "messages" and isinstance(each, dict) else None
            for within, block in enumerate(content if isinstance(content, list) else ()):
                places.append((f"{name}.{at}.content.{within}", block))
    for path, place in places:
        mark = place.get(_MARK) if isinstance(place, dict) else None
        if isinstance(mark, dict):
            ttl = mark.get("ttl")
            yield path, "5m" if ttl is None else ttl


def _set_params(body: Body, told: dict[str, Any] | None) -> None:
    """Set what the tier is told, and keep what others are told, such as the peer of a prefill.

    A value that is no object stays for vLLM to refuse.
    """
    params = _value(body.get(PARAMS, _NULL))
    if params is not None and not isinstance(params, dict):
        return
    rest = {name: value for name, value in (params or {}).items() if name != WORD}
    if told is not None:
        rest[WORD] = told
    if rest or params == {}:
        body[PARAMS] = Raw(json.dumps(rest).encode())
    elif params is not None:
        del body[PARAMS]


def _read(content: bytes) -> Body | None:
    """Return the members of a JSON object; None if there is none.

    What only Python's own reader takes, such as `NaN`, vLLM takes, too.
    """
    try:
        return _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        held = json.loads(content)
        if not isinstance(held, dict):
            return None
        return {name: Raw(json.dumps(value).encode()) for name, value in held.items()}
    except ValueError:
        return None
    except RecursionError:
        raise RequestError("The JSON body of your request is nested too deeply.") from None


def _value(raw: Raw) -> Any:
    try:
        return json.loads(bytes(raw))
    except RecursionError:
        raise RequestError("The JSON body of your request is nested too deeply.") from None
    except ValueError:
        raise RequestError("We could not parse the JSON body of your request.") from None


def _text(body: Body, name: str) -> str | None:
    """Return the text of a field, or None if it is absent or null."""
    value = _value(body.get(name, _NULL))
    if value is not None and not isinstance(value, str):
        text = f"Invalid type for '{name}': expected a string."
        raise RequestError(text, param=name, code="invalid_type")
    return value
