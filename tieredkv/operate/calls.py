"""All verbs of operators, and how a call is sent.

The command line, `/admin` and the engine read this one table. A verb is added by a module beside
this one, a name here, a branch of `engine.verbs.Verbs` where it concerns VRAM and host memory, and
a command in `cli.store`.
"""

from typing import get_args

import msgspec

from tieredkv.operate.df import Df
from tieredkv.operate.evict import EvictFilter
from tieredkv.operate.inspect import Inspect
from tieredkv.operate.ls import Ls
from tieredkv.operate.names_key import NamesKey
from tieredkv.operate.prune import Prune
from tieredkv.operate.rotate import Rotate
from tieredkv.operate.verify import Verify

__all__ = ["Call", "Df", "EvictFilter", "Inspect", "Ls", "NamesKey", "Prune", "Rotate", "Verify"]

_OfOperators = Df | Ls | Inspect | EvictFilter | Prune | Verify | Rotate
VERBS = {str(kind.__struct_config__.tag): kind for kind in get_args(_OfOperators)}
Call = _OfOperators | NamesKey
_decoder = msgspec.msgpack.Decoder(Call)


def decoded(data: bytes) -> Call:
    """Return the call in a message, which `Worker.ask_engine` has encoded."""
    call: Call = _decoder.decode(data)
    return call
