"""The command line: every verb is a thin layer over the module that does the work."""

from tieredkv.cli.main import main as main

__all__ = ["main"]
