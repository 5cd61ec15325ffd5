"""One line for each request: what it cost and where its prompt came from, but none of its text."""

import json
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.types import Scope

from tieredkv.errors import MAX_TOLD_CHARACTERS
from tieredkv.server.asked import cached_by_tier
from tieredkv.server.metrics import Observer
from tieredkv.server.reply import Reply

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("tieredkv.access")
"""Gets a line of JSON for each request where the setting `access_log` says so."""


class Answering(NamedTuple):
    """The answers to a request, which is kept in the request's scope as `answering`.

    Attributes:
        answers: so far; each prompt has `n` of them.
        observer: knows when the first token came, and how the request differs from earlier ones.
    """

    answers: Sequence[Reply]
    n: int
    observer: Observer

    def facts(self) -> dict[str, Any]:
        """Return counts of tokens, the reason of a miss, and the time to the first token."""
        prompts = [answer.usage for answer in self.answers[:: self.n]]
        missed = next((usage for usage in prompts if usage.miss_reason is not None), None)
        ttft_s = self.observer.ttft_s
        return {
            "prompt_tokens": sum(usage.prompt_tokens for usage in prompts),
            "output_tokens": sum(len(answer.token_ids) for answer in self.answers),
            "cached_tokens_by_tier": cached_by_tier(prompts),
            "miss_reason": missed and self.observer.diagnosis.miss(missed)["reason"],
            "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 3),
        }


_NOTHING = dict.fromkeys(
    ("prompt_tokens", "output_tokens", "cached_tokens_by_tier", "miss_reason", "ttft_ms")
)
"""The facts of a request that no model has answered."""


def write(scope: Scope, status: int, tenant: str | None, *, is_json: bool) -> None:
    """Write the line of a request that has ended.

    Args:
        scope: of the request.
        status: of its answer.
        tenant: what operators know its tenant by; None if it has none.
        is_json: whether the access log gets the line, too.
    """
    if not (is_json or logger.isEnabledFor(logging.DEBUG)):
        return
    answering: Answering | None = scope.get("answering")
    told = {
        "time": round(time.time(), 3),
        "id": scope["request_id"],
        "tenant": tenant,
        "method": scope["method"],
        "endpoint": scope["path"][:MAX_TOLD_CHARACTERS],
        "status": status,
        **(answering.facts() if answering else _NOTHING),
        "duration_ms": round(1000 * (time.perf_counter() - scope["arrived_at"]), 3),
    }
    line = json.dumps(told)
    logger.debug("request %s", line)
    if is_json:
        access_logger.info("%s", line)
