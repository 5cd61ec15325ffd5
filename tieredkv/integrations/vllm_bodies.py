"""Bodies of requests to vLLM, rewritten so that retention and tenant reach the tier.

    prompt_cache_retention  ┐
    prompt_cache_options    │
    prompt_cache_breakpoint ├─►  kv_transfer_params.tieredkv = {retention, pin_s, tenant}
    cache_control           │
    tenant of the API key   ┤
    cache_salt of the client┴─►  cache_salt, a digest that only this tenant gets

`tieredkv.cache_fields` reads the fields about caching, as for tieredkv's own server.

What a client sends in `kv_transfer_params.tieredkv` itself is removed. Its `cache_salt` never
reaches vLLM as it is: it narrows the tenant's namespace, as on tieredkv's own server. All other
fields stay as they are, byte for byte.

This module knows JSON and names of fields. It does not know HTTP, routes or vLLM.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from tieredkv import cache_fields
from tieredkv.cache_fields import (
    BREAKPOINT,
    CONTROL,
    OPTIONS_TTL,
    CacheFields,
    Lifetime,
    breakpoints_of,
)
from tieredkv.config import Settings
from tieredkv.engine.chains import namespace_of
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.hashing import namespace_digest
from tieredkv.server.asked import Rules

PARAMS = "kv_transfer_params"
SALT = "cache_salt"
KEY = "prompt_cache_key"
RETENTION, OPTIONS = "prompt_cache_retention", "prompt_cache_options"
WORD = "tieredkv"

_OF_VLLM = ("in_memory", "in-memory", "24h")
"""The words that vLLM's own request types allow in `prompt_cache_retention`.

In `prompt_cache_options` they allow `cache_fields.OPTIONS_TTL` alone."""

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
        retention, pin_s = _asked(body, endpoint, rules)
        if retention is None and (rules.max_retention or self.settings.max_retention):
            retention = rules.default.name
        if retention is not None:
            told["retention"] = retention
        if pin_s:
            told["pin_s"] = pin_s
        return told


def _asked(body: Body, endpoint: Endpoint, rules: Rules) -> tuple[str | None, float]:
    """Return the retention that a request asks for, and for how long it pins.

    vLLM takes one of each for a request: the longest that any of its fields asks for. Values that
    vLLM's types do not know are taken out of the body.

    Raises:
        RequestError: a field makes no sense, or no policy lasts as long as it asks for.
    """
    allowed, held = replace(rules.allowed, has_disk=True), dict[str, Any]()
    for name in cache_fields.PLACES:
        raw = bytes(body.get(name, _NULL))
        if any(each.encode() in raw for each in (CONTROL, BREAKPOINT)):
            held[name] = _value(body[name])
    names = (CONTROL,) if endpoint.is_anthropic else (RETENTION, OPTIONS, CONTROL)
    fields = read(CacheFields, {name: _value(body[name]) for name in names if name in body})
    named = fields.prompt_cache_retention
    own = None if endpoint.is_anthropic else allowed.named(named)
    if named is not None and named not in _OF_VLLM:
        del body[RETENTION]
    if fields.of_options.ttl != OPTIONS_TTL:
        rest = {name: it for name, it in _value(body[OPTIONS]).items() if name != "ttl"}
        body[OPTIONS] = Raw(json.dumps(rest).encode())
    first_with = dict[str | None, Lifetime]()
    for at in breakpoints_of(held):
        first_with.setdefault(at.ttl, at if at.ttl else fields.of_options)
    claims = [allowed.claim(at, own) for at in (*first_with.values(), *fields.of_whole)]
    if not claims:
        if fields.is_explicit:  # Nothing of it is to be kept.
            return allowed.briefest.name, 0.0
        return (own.name if own and named is not None else None), 0.0
    names_of_policies = {(own or rules.default).name, *(claim.retention for claim in claims)}
    longest = rules.settings.retention_policies().longest(names_of_policies)
    return longest, max(claim.pin_s for claim in claims)


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
