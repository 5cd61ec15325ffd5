"""The verbs of the command line, as the worker carries them out.

Each verb runs on its client's thread. The index thread does the part that touches the store, for a
short slice of time at once, so that loads and stores go on during a long `verify`. A verb that
concerns VRAM and host memory asks the engine as well.
"""

import itertools
import os
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from tieredkv.errors import (
    ConfigError,
    CorruptIndexError,
    MissingKeyError,
    NoServerError,
    StoreFailedError,
    StoreUnreachableError,
    UnknownIdError,
)
from tieredkv.operate import inspect as chain_blocks
from tieredkv.operate import inspection
from tieredkv.operate import prune as pruning
from tieredkv.operate.calls import (
    Call,
    Df,
    EvictFilter,
    Inspect,
    Ls,
    NamesKey,
    Prune,
    Rotate,
    Verify,
)
from tieredkv.operate.chains import Chains
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.ls import listing
from tieredkv.operate.models import KnownModels, read_models
from tieredkv.operate.ram import NO_RAM_BLOCKS, RamBlocks
from tieredkv.operate.table import BlockTable
from tieredkv.storage import erasure
from tieredkv.storage.control_server import Caller
from tieredkv.storage.index_entries import Totals
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.results import (
    ID_HINT,
    NOTHING_EVICTED,
    BlockInfo,
    ChainInfo,
    ErasureResult,
    PruneResult,
    StoreStats,
    VerifyResult,
    named_blocks,
)
from tieredkv.storage.worker_messages import ControlPage, ControlRequest, EngineAnswer
from tieredkv.types import TENANT_BYTES, Tier

_ENGINE_TIMEOUT_S = 5.0
_SLICE_S = 0.02
_REPORT_INTERVAL_S = 0.1
_ASKED_BLOCKS = 65_536  # of which the engine is told in one frame
_PAGE_BLOCKS = 4096  # of a chain, in one frame
_DROPPED = ("num_lookups_dropped", "num_touches_dropped")
_TOLD_NAMESPACES = 10_000  # the largest, in one frame
NO_ANSWER = {"engine": "no answer"}
"""What a silent engine is taken to say, and what an answer has that leaves out its blocks."""
SUMMED = ("evicted_blocks", "freed_bytes", "refused_blocks")

Hand = Callable[[Callable[[], None]], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def _numbers() -> Iterator[int]:
    """Number questions otherwise than the last worker did, whom an engine may still answer."""
    return itertools.count(random.getrandbits(48))


@dataclass(eq=False)
class Verbs:
    """Carries out the verbs of one store, any number of them at once.

    Args:
        store: the store.
        figures: reads the figures of the store; called by the index thread.
        hand: hands a call to the index thread.
        after_writes: hands a call to the index thread, to be made once every store received so far
            is acknowledged and before any later one is begun. So an eviction also drops blocks
            that were being written when it was asked for.
        ask_engine: sends a question to the engine; None if there is no engine.
    """

    store: BlockStore
    figures: Callable[[], StoreStats]
    hand: Hand
    after_writes: Hand
    ask_engine: Callable[[ControlRequest], None] | None
    _ids: Iterator[int] = field(default_factory=_numbers)
    _asked: dict[int, queue.SimpleQueue[EngineAnswer]] = field(default_factory=dict)
    _has_engine_ended: bool = False

    def hear_engine(self, answer: EngineAnswer) -> None:
        """Take the engine's answer; one that comes too late is dropped."""
        if (answers := self._asked.get(answer.id)) is not None:
            answers.put(answer)

    def note_engine_ended(self) -> None:
        """Note that the engine has given its last answer and is about to end.

        Clients whose calls need another answer lose their connections, and ask the next worker.
        """
        self._has_engine_ended = True

    def carry_out(self, call: Call, caller: Caller) -> dict[str, Any]:
        """Do what a client asks for and return what it is told."""
        call.check()
        match call:
            case Df(verbose=verbose):
                tiers = {"device": None, "host": None, **_only(self._ask(call, caller))}
                writer_pid = None if self.ask_engine is None else os.getpid()
                disk = msgspec.to_builtins(self._finish(self._figures(), caller))
                # What is dropped before it is sent to this worker, only the engine knows.
                known = tiers.get("disk") or {}
                disk |= {name: known[name] for name in _DROPPED if name in known}
                tenants = self._finish(self._tenants(), caller)
                answer = {**tiers, "disk": disk, "tenants": tenants, "writer_pid": writer_pid}
                return answer | (self._namespaces(caller) if verbose else {})
            case Ls():
                in_ram = self._ram_blocks(caller)
                for page in self._list(call, in_ram, caller):
                    caller.send_page(ControlPage(chains=page))
                return {} if in_ram.is_told else NO_ANSWER
            case Inspect(prompt=prompt) if prompt is not None:
                return self._inspect_prompt(call, caller)
            case Inspect(names=names) if names:
                blocks = self._read(names, caller)
                self._send(blocks, caller)
                is_known = any(info.block_hash == names[0].hex() for info in blocks)
                return {} if is_known else {"roots": self._roots(caller)}
            case Inspect():
                blocks = chain_blocks.in_order(self._inspect(call, caller).values())
                self._send(blocks, caller)
                return {}
            case EvictFilter():
                return self._evict(call, caller)
            case Prune():
                return self._prune(call, caller)._asdict()
            case Rotate():
                return self._finish(self._rotate(call), caller)
            case NamesKey() if self.store.lacks_keys:
                raise MissingKeyError(self.store.lacks_keys)
            case NamesKey():
                return {"names_key": self.store.names_key}
            case Verify() if self.store.lacks_keys:
                raise MissingKeyError(self.store.lacks_keys)
            case Verify() if call.erased_key or call.erased_namespace:
                proof = ErasureResult()
                self._finish(erasure.proving(self.store, call, proof), caller)
                return {"erased": proof.is_erased, **msgspec.to_builtins(proof)}
            case Verify():
                return dict(msgspec.to_builtins(self._verify(call, caller)))

    def _list(self, call: Ls, in_ram: RamBlocks, caller: Caller) -> Iterator[list[ChainInfo]]:
        """List chains by pages."""
        chains = self._chains(in_ram, caller)
        columns = ChainColumns.of(chains, KnownModels(read_models(self.store.path)))
        return listing(columns, call, self.store.clock.now())

    def _prune(self, call: Prune, caller: Caller) -> PruneResult:
        """Drop what nothing can use.

        Raises:
            StoreUnreachableError: the engine did not answer, and may have what orphans follow.
        """
        table, now = self._gather(caller), self.store.clock.now()
        models, in_ram = KnownModels(read_models(self.store.path)), self._ram_blocks(caller)
        if not in_ram.is_told:
            raise _silent_engine()
        doomed = pruning.useless(table, call.model, models, in_ram, now)
        return self._finish(pruning.dropping(self.store, doomed, dry_run=call.dry_run), caller)

    def _ram_blocks(self, caller: Caller) -> RamBlocks:
        """Ask the engine which blocks it has; of a silent engine none are known."""
        return RamBlocks.of(self._ask(Ls(), caller))

    def _send(self, blocks: Sequence[BlockInfo], caller: Caller) -> None:
        for start in range(0, len(blocks), _PAGE_BLOCKS):
            caller.send_page(ControlPage(blocks=[*blocks[start : start + _PAGE_BLOCKS]]))

    def _read(self, names: Sequence[bytes], caller: Caller) -> list[BlockInfo]:
        """Describe those of some blocks that are on disk."""
        return self._finish(chain_blocks.reading(self.store, names), caller)

    def _roots(self, caller: Caller) -> dict[bytes, bytes]:
        return {kind.root: kind.namespace for kind in self._gather(caller).kinds}

    def _inspect_prompt(self, call: Inspect, caller: Caller) -> dict[str, Any]:
        """Have the engine report on a prompt.

        Raises:
            NoServerError: no server is there to tokenize it.
            ConfigError: the server refuses the prompt.
        """
        answer = _only(self._ask(call, caller))
        if (answer.get("diverges_at"), answer.get("reason")) == (0, "never_seen"):
            answer = _only(self._ask(call, caller, roots=self._roots(caller)))
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        if "reason" not in answer:
            raise NoServerError("no server answers that could tokenize the prompt")
        return answer

    def _inspect(self, call: Inspect, caller: Caller) -> chain_blocks.Blocks:
        """Find the blocks of a chain in every tier.

        Raises:
            UnknownIdError: the id names none.
        """
        first, last = named_blocks(call.id) or ("", "")
        known: chain_blocks.Blocks = {}
        if not call.following:
            starts = self._finish(chain_blocks.naming(self.store, last or first), caller)
            known = self._climb(call, starts, caller)
        if not known and (call.following or last):
            behind = self._choose((call.id,), self._ram_blocks(caller), caller).following
            known = self._climb(replace(call, following=True), behind, caller)
        if not known:
            raise UnknownIdError(f"no chain has the id `{call.id}`\nhint: {ID_HINT}")
        return known

    def _climb(self, call: Inspect, starts: Iterable[bytes], caller: Caller) -> chain_blocks.Blocks:
        """Find blocks and all before them.

        A tier may lack a block in the middle of a chain that another one has. So each tier is asked
        for what the others have told of, until nothing new is told.

        Raises:
            StoreUnreachableError: the engine did not answer.
        """
        known: chain_blocks.Blocks = {}
        told, wanted = set[bytes](), set(starts)
        while True:
            on_disk = self._finish(chain_blocks.climbing(self.store, wanted - told), caller)
            told |= wanted
            chain_blocks.add(known, on_disk)
            told.update(bytes.fromhex(info.block_hash) for info in on_disk)
            lacking = chain_blocks.missing_parents(known)
            in_ram = list[BlockInfo]()
            for part in self._ask(call, caller, [*told, *lacking]):
                if "engine" in part:
                    raise _silent_engine()
                in_ram += msgspec.convert(part.get("blocks", []), list[BlockInfo])
            chain_blocks.add(known, in_ram)
            wanted = {*map(bytes.fromhex, known), *chain_blocks.missing_parents(known)}
            if wanted <= told:
                return known

    def _evict(self, wanted: EvictFilter, caller: Caller) -> dict[str, Any]:
        """Evict from RAM, then from the disk, so that no block which was evicted comes back.

        The engine's answer comes behind the stores that it sent before. What it dropped from RAM
        while it was being written is therefore on disk by now, and goes with the rest.

        Raises:
            NoServerError: the blocks are to be moved, and no engine is there.
            StoreUnreachableError: the engine did not answer; only the disk's blocks are gone.
        """
        if wanted.to != "drop" and self.ask_engine is None:
            raise NoServerError("no server runs that could move blocks to another tier")
        engine = dict[str, Any]()
        is_of_chains = bool(wanted.needs_list or wanted.ids)
        held = self._ram_blocks(caller) if is_of_chains else NO_RAM_BLOCKS
        if wanted.needs_list:
            wanted = wanted.of_listed(self._list(Ls(filter=wanted.filter), held, caller))
            if not wanted.ids:
                return {**NOTHING_EVICTED}
        unknown_to_engine, on_disk = set(wanted.ids), wanted.concerns(Tier.DISK)
        in_ram = wanted.concerns(Tier.DEVICE) or wanted.concerns(Tier.HOST)
        # A dry run that is not about chains is about the disk, so that the engine is not disturbed.
        chosen = inspection.NOTHING_CHOSEN
        if in_ram and (is_of_chains or not (wanted.dry_run and on_disk)):
            # RAM may have a part of a chain without the blocks that its id names.
            chosen = self._choose(wanted.ids, held, caller) if wanted.ids else chosen
            engine = self._evict_from_ram(wanted, chosen, caller)
            unknown_to_engine &= set(engine.pop("unknown_ids", wanted.ids))
        if not on_disk:
            if "engine" in engine:
                raise StoreUnreachableError("the engine is silent, so nothing was evicted")
            unknown_ids = [each for each in chosen.unknown_ids if each in unknown_to_engine]
            sums = {**dict.fromkeys(SUMMED, 0), **engine}
            return {**sums, "unknown_ids": unknown_ids, "disk": None}
        settled = threading.Event()
        self.after_writes(settled.set)
        while not settled.wait(_REPORT_INTERVAL_S):
            caller.report(0, 0)
        if wanted.ids:
            chosen = self._choose(wanted.ids, held, caller)
        else:
            chosen = self._match(wanted, caller)
        result = self._finish(inspection.evicting(self.store, wanted, chosen), caller)
        if "engine" in engine and wanted.dry_run:
            raise _silent_engine()
        if "engine" in engine:
            gone = f"{result.evicted_blocks} blocks were evicted from disk"
            why = "blocks in VRAM and host memory are still there and may come back"
            hint = "hint: evict again once the engine answers"
            raise StoreUnreachableError(f"{gone}, but the engine is silent: {why}\n{hint}")
        disk = {"evicted_blocks": result.evicted_blocks, "freed_bytes": result.freed_bytes}
        sums = {name: count + engine.get(name, 0) for name, count in disk.items()}
        keys: dict[str, Any] = {
            "erased_keys": [*result.erased_keys],
            "kept_keys": [*result.kept_keys],
        }
        keys |= {"keys_error": result.keys_error} if result.keys_error else {}
        unknown_ids = [each for each in result.unknown_ids if each in unknown_to_engine]
        return {**engine, **sums, "unknown_ids": unknown_ids, "disk": {**disk, **keys}}

    def _evict_from_ram(
        self, wanted: EvictFilter, chosen: inspection.Chosen, caller: Caller
    ) -> dict[str, Any]:
        """Have the engine evict, in questions that fit into a frame; sum up what it answers."""
        *following, last = _frames_of(chosen.following)
        first, *before = _frames_of(chosen.before)
        questions = [*((some, []) for some in following), (last, first), *(([], b) for b in before)]
        answers = list[dict[str, Any]]()
        for question in questions:
            answers.append(_only(self._ask(wanted, caller, *question)))
            if "engine" in answers[-1]:  # it is silent
                break
        told = {key: answer[key] for answer in reversed(answers) for key in answer}
        sums = {key: sum(answer.get(key, 0) for answer in answers) for key in SUMMED}
        return {**told, **sums}

    def _choose(self, ids: Sequence[str], in_ram: RamBlocks, caller: Caller) -> inspection.Chosen:
        """Find what ids name."""
        chains = self._chains(in_ram, caller)
        finding = inspection.finding(self.store, chains, in_ram, ids)
        places, unknown_ids = self._finish(finding, caller)
        own = chains.own(places)
        following, before = (
            self._finish(inspection.reading_hashes(self.store, blocks), caller)
            + in_ram.hashes_of(blocks)
            for blocks in own
        )
        return inspection.Chosen(following, before, tuple(unknown_ids))

    def _match(self, wanted: EvictFilter, caller: Caller) -> inspection.Chosen:
        """Find the blocks on disk that an eviction without ids is about."""
        blocks = inspection.matching(self._gather(caller), wanted, self.store.clock.now())
        hashes = self._finish(inspection.reading_hashes(self.store, blocks), caller)
        return inspection.Chosen(hashes)

    def _chains(self, in_ram: RamBlocks, caller: Caller) -> Chains:
        """See which chains there are in all tiers."""
        on_disk, now = self._gather(caller), self.store.clock.now()
        return Chains(*on_disk.unexpired(now).joined(in_ram.table.unexpired(now)))

    def _gather(self, caller: Caller) -> BlockTable:
        """See which blocks are on disk. What is made of them holds up no other verb."""
        return self._finish(inspection.gathering(self.store), caller)

    def _figures(self) -> Generator[None, None, StoreStats]:
        yield
        return self.figures()

    def _tenants(self) -> Generator[None, None, dict[str, Any]]:
        """Return the blocks and payload bytes on disk by tenant, of those who have the most."""
        yield
        sums = defaultdict[str, Totals](lambda: Totals(0, 0))
        with self.store.index.reading() as txn:
            for namespace, totals in txn.namespaces().items():
                tenant = namespace[:TENANT_BYTES].hex()
                sums[tenant] = sums[tenant].plus(*totals)
        most = sorted(sums, key=lambda tenant: -sums[tenant].payload_bytes)[:_TOLD_NAMESPACES]
        return {it: {"blocks": sums[it].num_blocks, "bytes": sums[it].payload_bytes} for it in most}

    def _namespaces(self, caller: Caller) -> dict[str, Any]:
        uses = inspection.adding_up(self._gather(caller).unexpired(self.store.clock.now()))
        told, models = uses[:_TOLD_NAMESPACES], KnownModels(read_models(self.store.path))
        for use in told:
            model = models.of(bytes.fromhex(use.root), bytes.fromhex(use.namespace))
            use.model = model.name if model else None
        return {"namespaces": msgspec.to_builtins(told), "num_namespaces": len(uses)}

    def _rotate(self, call: Rotate) -> Generator[None, None, dict[str, Any]]:
        """Replace the master key.

        Raises:
            ConfigError: the store is not encrypted.
            MissingKeyError: its keys are not there, or no new key is.
        """
        yield
        if self.store.lacks_keys:
            raise MissingKeyError(self.store.lacks_keys)
        if (keys := self.store.keys) is None:
            raise ConfigError(f"the store at `{self.store.path}` is not encrypted")
        where = keys.rotate(call.master_key, call.command)
        return {"master_key": where, "keys": len(keys.table)}

    def _verify(self, call: Verify, caller: Caller) -> VerifyResult:
        """Verify; an index that cannot be read ends the worker, and its next start makes it again.

        Raises:
            EOFError: nobody but the caller will start one.
        """
        result, repair = VerifyResult(), call.repair
        try:
            total = int(call.sample * self._finish(self._figures(), caller).blocks)
            steps = inspection.verifying(self.store, result, repair=repair, sample=call.sample)
            self._finish(steps, caller, lambda: (result.checked, total))
        except CorruptIndexError as error:
            if not repair:
                raise
            if self.ask_engine is None:
                raise EOFError from error
            result.add("index", is_repaired=True)
        except StoreFailedError:  # of damage, or not: the next worker looks before it serves
            if not repair:
                raise
            if self.ask_engine is None:
                raise EOFError from None
            result.add("index", is_repaired=False)
        return result

    def _ask(
        self,
        call: Call,
        caller: Caller,
        following: Sequence[bytes] = (),
        before: Sequence[bytes] = (),
        roots: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> Iterator[dict[str, Any]]:
        """Ask the engine, if there is one, and wait for each part of its answer, but not for ever.

        A part may be empty, to tell that the engine is still at it.

        A silent engine is taken to say `NO_ANSWER`.
        """
        if self.ask_engine is None:
            return
        job, answers = next(self._ids), queue.SimpleQueue[EngineAnswer]()
        self._asked[job] = answers
        try:
            self.ask_engine(ControlRequest(job, call, [*following], [*before], {**roots}))
            while (answer := self._next(answers, caller)) is not None:
                yield answer.body
                if not answer.has_more:
                    return
            yield NO_ANSWER
        finally:
            del self._asked[job]

    def _next(
        self, answers: "queue.SimpleQueue[EngineAnswer]", caller: Caller
    ) -> EngineAnswer | None:
        """Wait for the engine's next answer; None from a silent engine.

        Raises:
            EOFError: the engine has ended without it, or nobody waits any more.
        """
        deadline = time.monotonic() + _ENGINE_TIMEOUT_S
        while time.monotonic() < deadline:
            has_engine_ended = self._has_engine_ended  # its last answer is here by now
            try:
                return answers.get(timeout=_REPORT_INTERVAL_S)
            except queue.Empty:
                if has_engine_ended:
                    raise EOFError from None
                caller.report(0, 0)
        return None

    def _finish(
        self,
        steps: Generator[object, None, Result],
        caller: Caller,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> Result:
        """Have the index thread take all steps; return what they end with."""
        items = self._steps(steps, caller, progress)
        while True:
            try:
                next(items)
            except StopIteration as ending:
                result: Result = ending.value
                return result

    def _steps(
        self,
        steps: Generator[Item | None, None, Result],
        caller: Caller,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> Generator[Item, None, Result]:
        """Have the index thread take steps for a slice of time at once; yield the items they yield.

        No step is taken while the consumer is busy with an item. The caller is told several times
        a second that work goes on; if the caller has gone, the steps end.

        Args:
            steps: a generator, whose result this one returns.
            caller: the client that waits for the answer.
            progress: returns (done, total), or (0, 0) where that is not known.

        Raises:
            EOFError: nobody waits any more.
        """
        done: Future[tuple[Item | None, StopIteration | None]]
        is_awaited = True

        def take_slice() -> None:
            slice_end = time.monotonic() + _SLICE_S
            try:
                while time.monotonic() < slice_end:
                    if (item := next(steps)) is not None:
                        return done.set_result((item, None))
                if is_awaited:
                    self.hand(take_slice)
            except StopIteration as ending:
                done.set_result((None, ending))
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, CorruptIndexError | StoreFailedError):  # ends the worker
                    raise

        try:
            while True:
                done = Future()
                self.hand(take_slice)
                while not wait([done], _REPORT_INTERVAL_S).done:
                    caller.report(*progress())
                item, ending = done.result()
                if item is None:
                    assert ending is not None, "steps go on until an item or their end"
                    result: Result = ending.value
                    return result
                yield item
        finally:
            is_awaited = False


def _only(answer: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what the engine says in its last part; nothing where there is no engine."""
    return [{}, *answer][-1]


def _silent_engine() -> StoreUnreachableError:
    what = "the engine is silent, so what VRAM and host memory hold is not known"
    return StoreUnreachableError(f"{what}\nhint: try again once the engine answers")


def _frames_of(blocks: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Cut a list of blocks into parts that fit into a frame; there is at least one, if empty."""
    starts = range(0, max(len(blocks), 1), _ASKED_BLOCKS)
    return [blocks[start : start + _ASKED_BLOCKS] for start in starts]
