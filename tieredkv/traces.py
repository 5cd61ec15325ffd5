"""Traces of requests, in the format of the Mooncake paper, and as a server records them.

Each line of the file is a request: `timestamp` in ms, `input_length` and `output_length` in tokens,
and `hash_ids`, one for each block of the prompt. Equal ids are equal blocks with equal blocks
before them. The last block may be a partial one. A line may name its `session`. Other fields are
ignored.

Lines that a server records also have `block_tokens`. Their `hash_ids` are of the full blocks that
may be cached, `answer_hash_ids` of those that the answer has filled, and `retention` is the policy
of the request. They stand in the order in which the requests ended.

This module knows the format. It does not know blocks, tiers or policies.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST'25.
"""

import contextlib
import gzip
import itertools
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from tieredkv.errors import ConfigError
from tieredkv.types import Progress

BLOCK_TOKENS = 512
"""Tokens of one id in the published traces."""

STDIN = Path("-")
_GZIP_MAGIC = b"\x1f\x8b"
_TOLD_EVERY = 1000

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One request of a trace.

    Attributes:
        timestamp: when it came, in ms.
        input_length: tokens of its prompt.
        output_length: tokens of its answer.
        hash_ids: of the prompt's blocks.
        answer_hash_ids: of the blocks behind these that the answer has filled.
        block_tokens: tokens of one id, where a server recorded the request; else None.
        retention: name of its longest retention policy, where a server recorded it.
        session: the conversation that it belongs to, where a trace names it.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]
    answer_hash_ids: list[_Count] = []
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    retention: str | None = None
    session: str | int | None = None

    @property
    def chain(self) -> list[int]:
        """The ids of all its blocks, the head of the prompt first."""
        return self.hash_ids + self.answer_hash_ids if self.answer_hash_ids else self.hash_ids

    @property
    def most_cached_tokens(self) -> int:
        """Tokens of the prompt that a cache can have.

        A server counts the last token of a prompt that it has found whole as computed, since its
        logits are.
        """
        if self.block_tokens is None:
            return self.input_length
        return min(self.block_tokens * len(self.hash_ids), self.input_length - 1)


class Trace(NamedTuple):
    """The requests of a trace, in the order of their times.

    Attributes:
        name: of the file, for people.
        block_tokens: tokens of one id.
    """

    name: str
    requests: Sequence[Request]
    block_tokens: int = BLOCK_TOKENS

    @property
    def span_s(self) -> float:
        """Seconds between the first and the last request."""
        if not self.requests:
            return 0.0
        return (self.requests[-1].timestamp - self.requests[0].timestamp) / 1e3

    @property
    def num_distinct(self) -> int:
        """How many different blocks there are."""
        return len(set(itertools.chain.from_iterable(it.chain for it in self.requests)))

    @property
    def most_blocks(self) -> int:
        """How many blocks the longest request has."""
        return max((len(it.chain) for it in self.requests), default=0)


def read_trace(
    path: Path,
    progress: Progress,
    *,
    block_tokens: int | None = None,
    retentions: Collection[str] = (),
) -> Trace:
    """Read a trace, gzipped or not; `-` is stdin.

    Args:
        path: of the file.
        progress: called with the number of lines that were read.
        block_tokens: tokens of one id. By default as many as the trace says, else 512.
        retentions: names that `retention` may have; any, if there are none.

    Raises:
        ConfigError: it cannot be read or is no such trace; names the line and the field.
    """
    name, where = ("stdin", "stdin") if path == STDIN else (path.name, f"`{path}`")
    requests = list[Request]()
    decode, before, stage = msgspec.json.Decoder(Request).decode, 0.0, "reading the trace"
    number, size = 0, block_tokens or BLOCK_TOKENS
    try:
        with contextlib.ExitStack() as stack:
            for number, line in enumerate(_lines(path, stack), start=1):
                if number % _TOLD_EVERY == 0:
                    progress(stage, number, 0)
                if not line.strip():
                    continue
                request = decode(line)
                if not requests and block_tokens is None:
                    size = request.block_tokens or size
                _check(request, size)
                if retentions and request.retention is not None:
                    _check_retention(request.retention, retentions)
                if request.block_tokens is None:
                    _check_order(request, before)
                    before = request.timestamp
                requests.append(request)
    except (OSError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the trace {where} cannot be read: {why}") from error
    except EOFError as error:
        raise ConfigError(f"the trace {where} is cut short after line {number}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}, line {number}: {_told(error)}\n{_HINT}") from error
    finally:
        progress(stage, 1, 1)
    if not requests:
        raise ConfigError(f"the trace {where} has no requests\n{_HINT}")
    requests.sort(key=lambda request: request.timestamp)
    return Trace(name, requests, size)


_HINT = (
    'hint: each line is a request such as {"timestamp": 27482, "input_length": 1030, '
    '"output_length": 52, "hash_ids": [46, 47, 2353]}'
)


def _lines(path: Path, stack: contextlib.ExitStack) -> Iterable[bytes]:
    """Return the lines of a file, whose first bytes tell whether it is gzipped."""
    file: Any = sys.stdin.buffer if path == STDIN else stack.enter_context(path.open("rb"))
    return gzip.open(file) if file.peek(2).startswith(_GZIP_MAGIC) else file


def _check_order(request: Request, before: float) -> None:
    """Raise ConfigError if a request came before an earlier line's."""
    if request.timestamp < before:
        what = f"`timestamp` is {request.timestamp:g}, before the {before:g} of an earlier line"
        raise ConfigError(f"{what}; sort the trace by time")


def _check_retention(name: str, known: Collection[str]) -> None:
    """Raise ConfigError if there is no such policy."""
    if name not in known:
        what = f"`retention` is `{name}`, but the policies are {', '.join(known)}"
        way_out = "name the server's file in `--config`, or give `--retention` for all requests"
        raise ConfigError(f"{what}; {way_out}")


def _check(request: Request, block_tokens: int) -> None:
    """Raise ConfigError if a request contradicts itself or the size of the blocks."""
    num_ids, num_tokens = len(request.hash_ids), request.input_length
    if request.block_tokens is None:
        if num_ids != -(-num_tokens // block_tokens):
            what = f"`hash_ids` has {num_ids} ids, but `input_length` = {num_tokens}"
            needs = f"needs {-(-num_tokens // block_tokens)}, one for each {block_tokens} tokens"
            raise ConfigError(f"{what} {needs}")
    elif request.block_tokens != block_tokens:
        raise ConfigError(
            f"`block_tokens` is {request.block_tokens}, but {block_tokens} is expected"
        )
    else:
        num_full = num_tokens // block_tokens
        if num_ids > num_full:
            what = f"`hash_ids` has {num_ids} ids, but `input_length` = {num_tokens}"
            raise ConfigError(f"{what} has {num_full} full blocks of {block_tokens} tokens")
        if len(request.chain) > (num_tokens + request.output_length) // block_tokens:
            what = f"`answer_hash_ids` has {len(request.answer_hash_ids)} ids"
            raise ConfigError(
                f"{what}, more than `output_length` = {request.output_length} can fill"
            )
    if len(set(request.chain)) < len(request.chain):
        raise ConfigError("`hash_ids` has an id twice, but a block cannot begin with itself")


def _told(error: Exception) -> str:
    """Return what is wrong with a line; the field comes first."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        what, _, place = text.rpartition(" - at `$.")
        if what:
            return f"`{place.rstrip('`')}`: {what[0].lower()}{what[1:]}"
        return f"{text[0].lower()}{text[1:]}"
    if isinstance(error, msgspec.DecodeError):
        return f"is not JSON: {text}"
    return text
