"""httpx's functions with a timeout that a busy machine keeps; its own five seconds it does not."""

from functools import partial

import httpx

TIMEOUT_S = 120.0

request = partial(httpx.request, timeout=TIMEOUT_S)
get, head, post = (partial(request, method) for method in ("GET", "HEAD", "POST"))
stream = partial(httpx.stream, timeout=TIMEOUT_S)
