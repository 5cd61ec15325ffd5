"""The master key of a store that a bench makes and removes."""

import os

from tieredkv.storage import master_key


def make_temporary_key(key_dir: str) -> str:
    """Make a folder of keys with a master key in it; return the path of that key.

    A store that makes its own asks people to keep a copy of it.
    """
    os.makedirs(key_dir, 0o700)
    path = os.path.join(key_dir, "master")
    master_key.make_file(path)
    return path
