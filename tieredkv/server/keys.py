"""Who may ask: API keys from flags and from a file, what each may do, and the operator's own key.

It knows digests of keys and headers, not what a request asks for. A tenant is a key's digest.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tieredkv.config import Settings
from tieredkv.errors import ConfigError, RequestError
from tieredkv.server.asked import Rules


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a table of the file says of a key; one from a flag has the defaults.

    Attributes:
        key, key_sha256: the key or its digest in hex, one of the two.
        retention: the longest policy that its requests may name; None for the server's.
        share: of every tier, which others cannot take from it.
        admin: it opens `/admin`, too.
    """

    key: str = ""
    key_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    retention: str | None = None
    share: float = 0.0
    admin: bool = False


@dataclass(kw_only=True)
class Keys:
    """The keys of a server, and what each may do.

    Attributes:
        settings: where they are.
        is_strict: as `Rules` have it.
        is_local: only this machine can ask.
        shares: of every tier, by the tenants that have one.

    Raises:
        ConfigError: the file of keys is not as it must be.
    """

    settings: Settings
    is_strict: bool
    is_local: bool
    shares: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.load()

    def load(self) -> None:
        """Read the file, or read it again.

        Raises:
            ConfigError: the file is not as it must be; the keys stay as they were.
        """
        keys = {_digest(key.encode()): Key() for key in self.settings.api_keys} | self._read()
        shares = {digest: key.share for digest, key in keys.items() if key.share}
        shares = {**self.settings.tenant_shares, **shares}
        replace(self.settings, tenant_shares=shares)  # refuses what is more than all
        admin_key = self.settings.admin_key
        self._admins = [digest for digest, key in keys.items() if key.admin]
        self._admins += [_digest(admin_key.encode())] if admin_key else []
        self._others = Rules(self.settings, self.is_strict)
        self._rules = {
            digest: Rules(self.settings, self.is_strict, key.retention)
            for digest, key in keys.items()
        }
        self._keys, self.shares = keys, shares

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Return whose request it is: a digest of its key, or the one tenant where no key is set.

        Raises:
            RequestError: keys are set and the request has none of them.
        """
        return _match(headers, self._keys) if self._keys else ""

    def rules(self, tenant: str) -> Rules:
        """Return what a tenant's requests may say."""
        return self._rules.get(tenant, self._others)

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Refuse who has no admin key; where no key at all is set, this machine is trusted.

        Raises:
            RequestError: the key is missing or wrong, or anybody could ask.
        """
        if self._admins:
            _match(headers, self._admins)
        elif self._keys or not self.is_local or "origin" in headers:  # the latter from a web page
            text = "This is off: set an admin key, with --admin-key or in the file of keys."
            raise RequestError(text, code="admin_off", status=403)

    def check_metrics(self, headers: Mapping[str, str]) -> None:
        """Refuse who may not see figures: with an admin key only the operator, else any tenant.

        Raises:
            RequestError: a key is missing or wrong.
        """
        needs_key = {"auto": not self.is_local, "always": True, "never": False}
        known = self._admins or list(self._keys)
        if known and needs_key[self.settings.metrics_key]:
            _match(headers, known)

    def _read(self) -> dict[str, Key]:
        if self.settings.api_keys_file is None:
            return {}
        path = Path(self.settings.api_keys_file)
        try:
            mode = path.stat().st_mode & 0o777
            keys = msgspec.toml.decode(path.read_bytes(), type=dict[str, Key])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"`{path}` is no file of keys: {error}") from error
        if not keys:
            raise ConfigError(f"`{path}` holds no key")
        if mode & 0o077:
            hint = f"hint: run `chmod go= {path}`"
            raise ConfigError(f"`{path}` holds keys and is open to others ({mode:04o})\n{hint}")
        known = sorted(Rules(self.settings).policies.names)
        for name, key in keys.items():
            if bool(key.key) == bool(key.key_sha256):
                raise ConfigError(f"`{path}`: `{name}` needs one of `key` and `key_sha256`")
            if key.retention not in (None, *known):
                told = f"`{name}.retention` = `{key.retention}` must be one of {', '.join(known)}"
                raise ConfigError(f"`{path}`: {told}")
        return {key.key_sha256 or _digest(key.key.encode()): key for key in keys.values()}


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _match(headers: Mapping[str, str], digests: Iterable[str]) -> str:
    """Return the digest of a request's key, which must be one of those."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        given = headers.get("x-api-key", "")
    if not given:
        text = (
            "You didn't provide an API key. You need to provide your API key in an "
            "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
        raise RequestError(text, code="invalid_api_key", status=401)
    digest = _digest(given.strip().encode("latin-1", "replace"))
    # Every key is compared, so that the time tells nothing of which one is close.
    if not any([hmac.compare_digest(digest, each) for each in digests]):
        raise RequestError("Incorrect API key provided.", code="invalid_api_key", status=401)
    return digest
