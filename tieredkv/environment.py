"""What the environment of a process says beside the settings, which `config` reads."""

import os

from tieredkv.errors import ConfigError


def default_key_dir() -> str:
    """Return the folder of the disk tier's keys where no setting names one.

    Raises:
        ConfigError: this user has no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification has such a path ignored
        state = os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):
        raise ConfigError("there is no home folder for the keys of the store; set `disk_key_dir`")
    return os.path.join(state, "tieredkv", "keys")
