"""The command line: what people type and read; every verb is a thin layer over what does it."""

from tieredkv.cli.main import main as main

__all__ = ["main"]
