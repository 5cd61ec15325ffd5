"""The HTTP clients with which verbs and benches ask servers by their URLs.

A server on this machine is asked directly, whatever proxies the environment names: a proxy cannot
reach it, or would reach another machine by the same name. For any other host the environment's
proxies count. This module knows URLs and proxies, but no API.
"""

import ipaddress
import os
import re
import socket
from importlib.util import find_spec
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from tieredkv.errors import ConfigError

PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")
MAX_PORT = 65535
_HOST = re.compile(r"\w[\w.-]*|[0-9a-fA-F:.]+")


def http_client(url: str, **options: Any) -> httpx.Client:
    """Return a client whose requests are relative to a URL.

    Args:
        url: of the server, without the path of an API.
        options: further arguments of `httpx.Client`.

    Raises:
        httpx.InvalidURL: the URL cannot be parsed.
        ConfigError: the variable that names the proxy to use has no URL of a proxy.
    """
    return httpx.Client(base_url=url, **_routing(url), **options)


def async_http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """Return a client for asyncio; see `http_client`."""
    return httpx.AsyncClient(base_url=url, **_routing(url), **options)


def is_loopback(host: str) -> bool:
    """Return whether a host of a URL is this machine, without asking any name server.

    The addresses 0.0.0.0 and :: count, since a connection to them reaches this machine.
    """
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:  # also forms such as 127.1
        found = socket.getaddrinfo(name, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _routing(url: str) -> dict[str, Any]:
    """Return the arguments of a client that decide how it reaches a URL."""
    parsed = httpx.URL(url)
    routing: dict[str, Any] = {"trust_env": False}  # httpx would take proxies of loopback, too
    if parsed.scheme == "https":
        routing["verify"] = httpx.create_ssl_context()  # of the environment's certificates
    if proxy := _proxy_for(parsed):
        routing["proxy"] = proxy
    return routing


def _proxy_for(url: httpx.URL) -> httpx.Proxy | None:
    """Return the proxy that the environment names for a URL, if there is one."""
    proxies = getproxies()
    if is_loopback(url.host) or proxy_bypass(url.netloc.decode("ascii"), proxies):
        return None
    scheme = url.scheme if proxies.get(url.scheme) else "all"
    return _read(scheme, given) if (given := proxies.get(scheme)) else None


def _read(scheme: str, given: str) -> httpx.Proxy:
    """Return the proxy that a variable's value names.

    Raises:
        ConfigError: it names none.
    """
    name = f"{scheme}_proxy"
    name = next((it for it in os.environ if it.lower() == name and os.environ[it] == given), name)
    try:
        proxy = httpx.Proxy(given if "://" in given else f"http://{given}")
        is_proxy = proxy.url.scheme in PROXY_SCHEMES and proxy.url.path in ("", "/")
        is_proxy &= bool(_HOST.fullmatch(proxy.url.host)) and (proxy.url.port or 1) <= MAX_PORT
    except (httpx.InvalidURL, ValueError):
        is_proxy = False
    shown = given.rpartition("@")[2]  # without a password
    if not is_proxy:
        what = f"variable `{name}` = `{shown}` is not the URL of a proxy"
        raise ConfigError(f"{what}\nhint: write one such as http://proxy.example.com:3128")
    if proxy.url.scheme.startswith("socks") and find_spec("socksio") is None:
        what = f"variable `{name}` = `{shown}` names a SOCKS proxy, which needs another package"
        raise ConfigError(f"{what}\nhint: run `pip install httpx[socks]`")
    return proxy
