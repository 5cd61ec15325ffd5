"""httpx's functions for servers on this machine: without proxies, and with a longer timeout.

Five seconds are too few on a busy machine.
"""

from functools import partial

import httpx

from tests.waiting import HANG_S

request = partial(httpx.request, timeout=HANG_S, trust_env=False)
get, head, post = (partial(request, method) for method in ("GET", "HEAD", "POST"))
stream = partial(httpx.stream, timeout=HANG_S, trust_env=False)
