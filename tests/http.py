"""httpx's functions with a longer timeout, because five seconds are too few on a busy machine."""

from functools import partial

import httpx

from tests.waiting import HANG_S

request = partial(httpx.request, timeout=HANG_S)
get, head, post = (partial(request, method) for method in ("GET", "HEAD", "POST"))
stream = partial(httpx.stream, timeout=HANG_S)
