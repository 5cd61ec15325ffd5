"""Has an interruption come once more that Python has dropped."""

import signal
import sys

_AGAIN_S = 0.05


def repeat_dropped_interruptions() -> None:
    """Have a KeyboardInterrupt that is raised in a finalizer come again a moment later.

    Python only reports what is raised in a finalizer, and goes on. While modules are imported, that
    meets one interruption of some dozens. Called by the main thread, which gets the repetition.
    """
    report = sys.unraisablehook

    def repeat(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # raised here, it would be dropped, too
        else:
            report(dropped)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = repeat
