"""A verb that a server has carried out by a process of its own, and the answer as that writes it.

The process reads one `Job` from its standard input. To its standard output it writes one line, a
`Head` as JSON, and after it the JSON document that the command line prints, as it is made.
"""

from typing import Any

import msgspec

from tieredkv.operate.calls import Call


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be carried out.

    Attributes:
        call: the verb.
        path: the store's folder; "" on a server without a disk tier.
        clock_offset_file: see `tieredkv.clock`.
        told: on a server without a disk tier: what its engine has told.
    """

    call: Call
    path: str = ""
    clock_offset_file: str | None = None
    told: list[dict[str, Any]] = []


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer begins.

    Attributes:
        refused: the name of an exception of `tieredkv.errors`; "" if the document follows.
        message: its text.
    """

    refused: str = ""
    message: str = ""


decoder = msgspec.msgpack.Decoder(Job)
