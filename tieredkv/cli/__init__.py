"""The command line: every verb is a thin layer over the module that does the work."""

from tieredkv.cli.main import main as main
from tieredkv.cli.main import run as run

__all__ = ["main", "run"]
