"""The command line; its entry point is `run`, and each verb has a module of its own or shares one.

Importing the rest takes a tenth of a second, in which Ctrl-C ends the process without a traceback.
"""

import signal
from typing import NoReturn


def run() -> NoReturn:
    """Run the command line of this process, and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tieredkv.cli.main import run as run_process  # only now, as said above

    run_process()
