"""The master key of a store: where it comes from, and what it must be.

It is read from a file or from the output of a command, or made in a new file. It has 32 bytes,
which may be given as they are, as 64 hexadecimal digits or in base64. This module knows no store
and no key table.
"""

import base64
import binascii
import os
import secrets
import shlex
import subprocess
from contextlib import suppress

from tieredkv.errors import MissingKeyError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.keys import trust
from tieredkv.storage.keys.layout import KEY_BYTES
from tieredkv.wire.limits import described

WHAT = "the master key"
MASTER_SUFFIX = ".master"
_COMMAND_TIMEOUT_S = 30.0
_MOST_BYTES = 1024  # of a file or an output that could hold a key
_HEX_DIGITS, _BASE64_CHARACTERS = 2 * KEY_BYTES, 44


def read_file(path: str) -> bytes:
    """Read a master key from a file; the file may be a link if nobody else can change it.

    Raises:
        MissingKeyError: there is no such file, it is not to be believed or open to others
            (`tieredkv.storage.keys.trust`), or it holds no key; the error's `reason` tells.
    """
    try:
        fd = trust.open_file(path, WHAT, follows_link=True)
    except MissingKeyError as error:
        if error.reason != "absent":
            raise
        hint = "hint: say where it is with `disk_key_dir` or `disk_master_key`, restore it from a "
        hint += "copy, without which nothing in the store can be read, or give another `disk_dir`"
        raise MissingKeyError(f"{error}\n{hint}", reason="absent") from None
    try:
        data = os.read(fd, _MOST_BYTES)
    except OSError as error:
        text = f"{WHAT} `{path}` cannot be read: {described(error)}"
        raise MissingKeyError(text, reason="unreadable") from error
    finally:
        os.close(fd)
    return _parse(data, f"{WHAT} `{path}`")


def make_file(path: str) -> bytes:
    """Make a new master key in a file that does not exist yet, and flush it to the device.

    Raises:
        MissingKeyError: the file cannot be made, or others can write to its folder; no file is
            left behind.
    """
    key = secrets.token_bytes(KEY_BYTES)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        text = (
            f"{WHAT} `{path}` cannot be made: there is no folder `{folder}`; choose another place"
        )
        raise MissingKeyError(text, reason="absent")
    trust.check_folder(folder)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(key.hex().encode() + b"\n")
                file.flush()
                os.fsync(fd)
            flush_folder(folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
    except OSError as error:
        text = f"{WHAT} `{path}` cannot be made: {described(error)}; choose another place"
        raise MissingKeyError(text, reason="unreadable") from error
    return key


def ask_command(command: str) -> bytes:
    """Run a command without a shell, and take what it prints for the master key.

    Raises:
        MissingKeyError: the command fails, takes longer than half a minute or prints no key.
    """
    what = f"the command of the master key, `{command}`,"
    if not command.strip():
        raise MissingKeyError(f"{what} is empty; name a program", reason="unreadable")
    try:
        words = shlex.split(command)
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        text = f"{what} did not end within {_COMMAND_TIMEOUT_S:.0f} s"
        raise MissingKeyError(text, reason="unreadable") from None
    except (OSError, ValueError) as error:  # no program, no closing quote
        raise MissingKeyError(f"{what} cannot be run: {error}", reason="unreadable") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()[-300:]
        text = f"{what} ended with exit code {done.returncode}: {why}"
        raise MissingKeyError(text, reason="unreadable")
    return _parse(done.stdout, f"the output of `{command}`")


def _parse(data: bytes, what: str) -> bytes:
    """Return the key that a file or an output holds."""
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    try:
        if len(text) == _HEX_DIGITS:
            return binascii.unhexlify(text)
        if len(text) == _BASE64_CHARACTERS:
            key = base64.b64decode(text, validate=True)
            if len(key) == KEY_BYTES:
                return key
    except binascii.Error:
        pass
    size = f"more than {_MOST_BYTES - 1}" if len(data) >= _MOST_BYTES else f"{len(data)}"
    forms = f"{KEY_BYTES} bytes, as they are, as {_HEX_DIGITS} hexadecimal digits or in base64"
    message = f"{what} has {size} bytes, but a master key is {forms}"
    raise MissingKeyError(message, reason="no key")
