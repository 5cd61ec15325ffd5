"""The log of tieredkv inside vLLM's processes."""

import logging

OURS, THEIRS = "tieredkv", "vllm"


def join_log() -> None:
    """Have tieredkv's messages written as vLLM writes its own, at vLLM's level.

    vLLM configures no logger but its own, and libraries of its server silence all others but for
    errors. If tieredkv's logger was configured by somebody else, or vLLM's by nobody, nothing
    changes.
    """
    ours, theirs = logging.getLogger(OURS), logging.getLogger(THEIRS)
    if ours.handlers or ours.level or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    least = min(handler.level for handler in theirs.handlers)
    ours.setLevel(max(theirs.getEffectiveLevel(), least))
    ours.propagate = False
