"""Access: API keys from flags and from a file, what each allows, the admin key, and host names.

It knows digests of keys and headers, not what a request asks for. A tenant is a key's digest.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tieredkv.config import Settings
from tieredkv.errors import ConfigError, RequestError
from tieredkv.server.asked import Rules

MAX_FILE_BYTES = 16 << 20
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(r":\d*$")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file of keys; keys given as flags have the defaults.

    Attributes:
        key, key_sha256: the key or its digest in hex; exactly one of the two is given.
        retention: the longest policy that requests with this key may name; None for the server's.
        share: the fraction of every tier that is reserved for this key.
        admin: whether the key also opens `/admin`.
    """

    key: str = ""
    key_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    retention: str | None = None
    share: float = 0.0
    admin: bool = False


class Access(NamedTuple):
    """Everything that is looked up by a key's digest.

    Attributes:
        rules: the rules for the requests of each key.
        admins: the digests of the keys that open `/admin`.
        shares: the reserved fraction of every tier, for the tenants that have one.
        names: the tables of the file of keys that the keys came from.
    """

    rules: dict[str, Rules]
    admins: list[str]
    shares: dict[str, float]
    names: dict[str, str]


@dataclass(kw_only=True)
class Keys:
    """The keys of a server, and the checks of a request's headers.

    Attributes:
        settings: name the keys and the file of keys.
        is_strict: whether unknown request fields are refused.
        is_local: whether the server listens on loopback only.
        on_adopt: called when other keys have become valid.

    Raises:
        ConfigError: the file of keys cannot be used.
    """

    settings: Settings
    is_strict: bool
    is_local: bool

    def __post_init__(self) -> None:
        own = self.settings.host
        names = {*LOCAL_HOSTS, *self.settings.allowed_hosts, f"[{own}]" if ":" in own else own}
        self._others = Rules(self.settings, self.is_strict)
        self._hosts = {name.lower() for name in names if name}
        self.on_adopt: Callable[[], None] = lambda: None
        self.adopt(self.read())

    def read(self) -> Access:
        """Read the keys and return what they allow, without changing anything; any thread may.

        Raises:
            ConfigError: the file of keys cannot be used; the message names the table at fault.
        """
        settings, own = self.settings, {_digest(key): Key() for key in self.settings.api_keys}
        by_table = {} if settings.api_keys_file is None else _read_file(settings.api_keys_file)
        keys = dict(own)
        tables = dict.fromkeys(own, "api_keys")
        for table, key in by_table.items():
            digest = key.key_sha256 or _digest(key.key)
            if digest in keys:
                told = f"`{table}` has the same key as `{tables[digest]}`; remove one of them"
                raise ConfigError(f"`{settings.api_keys_file}`: {told}")
            keys[digest], tables[digest] = key, table
            _check_retention(settings, table, key)
        shares = {digest: key.share for digest, key in keys.items() if key.share}
        shares = {**settings.tenant_shares, **shares}
        replace(settings, tenant_shares=shares)  # refuses what is more than all
        admins = [digest for digest, key in keys.items() if key.admin]
        admins += [_digest(settings.admin_key)] if settings.admin_key else []
        rules = {
            digest: Rules(settings, self.is_strict, key.retention) for digest, key in keys.items()
        }
        names = {digest: table for digest, table in tables.items() if digest not in own}
        return Access(rules, admins, shares, names)

    def adopt(self, access: Access) -> None:
        """Use what was read for all later requests; called on the server's event loop."""
        self._access = access
        self.on_adopt()

    def knows(self, tenant: str) -> bool:
        """Return whether requests of a tenant are still taken."""
        return tenant in self._access.rules if self._access.rules else not tenant

    def name_of(self, tenant: str) -> str:
        """Return what an operator knows a tenant by: its table, or the beginning of its digest."""
        return self._access.names.get(tenant, f"key {tenant[:8]}" if tenant else "without a key")

    @property
    def num_keys(self) -> int:
        """How many keys there are; 0 if none is needed."""
        return len(self._access.rules)

    @property
    def shares(self) -> dict[str, float]:
        """The reserved fraction of every tier, for the tenants that have one."""
        return self._access.shares

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Return the tenant of a request: its key's digest, or "" where no key is set.

        Raises:
            RequestError: keys are set and the request has none of them.
        """
        return _match(headers, self._access.rules) if self._access.rules else ""

    def check_host(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse a request whose Host header does not name this server.

        A web page can have its own host name resolve to this machine (DNS rebinding). Browsers then
        let it read every answer of a server without keys, but its requests still name the page's
        host. Probes may leave the header out, on `/health` only.

        Raises:
            RequestError: the host is not accepted.
        """
        allowed = self.settings.allowed_hosts
        if "*" in allowed or not (allowed or (self.is_local and not self._access.rules)):
            return
        host = headers.get("host", "")
        if _PORT.sub("", host.lower()) in self._hosts or (path == "/health" and not host):
            return
        why = "is not accepted" if allowed else "is not accepted by a server without API keys"
        hint = "Use localhost, or have the operator add the name to `allowed_hosts`"
        text = f"The Host header `{host[:200]}` {why}. {hint} (--allowed-host)."
        raise RequestError(text, code="host_not_allowed", status=403)

    def rules(self, tenant: str) -> Rules:
        """Return the rules for a tenant's requests."""
        return self._access.rules.get(tenant, self._others)

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Refuse requests without an admin key.

        A server on loopback without any key trusts this machine, except for web pages.

        Raises:
            RequestError: the key is missing or wrong, or no admin key is set where one is needed.
        """
        if self._access.admins:
            _match(headers, self._access.admins)
        elif (
            self._access.rules or not self.is_local or "origin" in headers
        ):  # the latter from a web page
            text = "The admin API is off: set an admin key with --admin-key or in the file of keys."
            raise RequestError(text, code="admin_off", status=403)

    def check_metrics(self, headers: Mapping[str, str]) -> None:
        """Refuse requests for metrics without a key, as `metrics_key` has it.

        The admin key is needed if one is set, else any tenant's key.

        Raises:
            RequestError: the key is missing or wrong.
        """
        needs_key = {"auto": not self.is_local, "always": True, "never": False}
        known = self._access.admins or list(self._access.rules)
        if known and needs_key[self.settings.metrics_key]:
            _match(headers, known)


def _read_file(path: str) -> dict[str, Key]:
    """Return the keys of a file by the names of their tables, each checked by itself."""
    try:
        # A FIFO that nobody writes to would be waited for without `O_NONBLOCK`.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"`{path}` is not a regular file")
            if status.st_size > MAX_FILE_BYTES:
                text = f"`{path}` has {status.st_size} bytes; at most {MAX_FILE_BYTES} are read"
                raise ConfigError(text)
            keys = msgspec.toml.decode(file.read(MAX_FILE_BYTES), type=dict[str, Key])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"`{path}` cannot be read as a file of keys: {why}") from error
    if not keys:
        raise ConfigError(f"`{path}` holds no key; add a table with `key` or `key_sha256`")
    if (mode := status.st_mode & 0o777) & 0o077:
        hint = f"hint: run `chmod go= {path}`"
        raise ConfigError(f"`{path}` holds keys, but others can use it (mode {mode:04o})\n{hint}")
    for table, key in keys.items():
        if bool(key.key) == bool(key.key_sha256):
            raise ConfigError(f"`{path}`: `{table}` must have either `key` or `key_sha256`")
        if key.key != key.key.strip() or key.key_sha256 == _digest(""):
            text = "has a key that is blank or has blanks around it, which no client can send"
            raise ConfigError(f"`{path}`: `{table}` {text}")
    return keys


def _check_retention(settings: Settings, table: str, key: Key) -> None:
    known = sorted(Rules(settings).policies.names)
    if key.retention not in (None, *known):
        told = f"`{table}.retention` = `{key.retention}` must be one of {', '.join(known)}"
        raise ConfigError(f"`{settings.api_keys_file}`: {told}")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def presented_key(headers: Mapping[str, str]) -> bytes:
    """Return the API key in a request's headers as its client sent it; empty if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        given = headers.get("x-api-key", "")
    # Starlette decodes headers as Latin-1; this gets the bytes back, which may be UTF-8.
    return given.strip().encode("latin-1", "replace")


def _match(headers: Mapping[str, str], digests: Iterable[str]) -> str:
    """Return the digest of the request's key, which must be one of `digests`."""
    if not (given := presented_key(headers)):
        text = (
            "You didn't provide an API key. You need to provide your API key in an "
            "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
        raise RequestError(text, code="invalid_api_key", status=401)
    digest = hashlib.sha256(given).hexdigest()
    # Every key is compared, so that the time does not show which one is close.
    if not any([hmac.compare_digest(digest, each) for each in digests]):
        raise RequestError("Incorrect API key provided.", code="invalid_api_key", status=401)
    return digest
