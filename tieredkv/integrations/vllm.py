"""Our disk tier as a secondary tier of vLLM's tiering connector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
            "secondary_tiers": [{"type": "TieredKVTier",
                "module_path": "tieredkv.integrations.vllm", "disk_dir": "/nvme/kv",
                "disk_size": "500GiB", "default_retention": "in_memory"}]}}'

vLLM 0.26 does not know `module_path`: there `tieredkv.integrations.vllm_plugin` registers the tier.

vLLM's scheduler process has one tier for all its tensor-parallel ranks, as one row of its shared
memory holds a chunk of all of them. It calls the tier under a lock and must not wait for it. This
module translates between its words and ours; `row_store` moves the rows.

A request says how long its chunks are kept by `kv_transfer_params`, such as `{"tieredkv":
{"retention": "24h", "tenant": "a"}}`. What tells nothing gets the settings' `default_retention`;
what tells something that is not known here is kept in memory only. vLLM itself shares its memory
among all who send the same tokens and the same `cache_salt`, whatever tenant they name here.

vLLM loads the head of a prompt or none of it. `restore_chooser` chooses for each request, once the
disk has told how much of it is there; a chunk that is computed by choice is a miss for vLLM.
"""

import dataclasses
import functools
import inspect
import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

try:
    import vllm.v1.kv_offload.base as vllm_base
    import vllm.v1.kv_offload.tiering.base as vllm_tiering
    from vllm.version import __version__ as vllm_version

    _Base: Any = vllm_tiering.SecondaryTierManager
    _Verdict: Any = vllm_base.LookupResult
    _JobResult: Any = vllm_tiering.JobResult
    _OffloadPolicy: Any = vllm_base.OffloadPolicy
    _RequestContext: Any = vllm_base.RequestOffloadingContext
except (ImportError, AttributeError) as problem:
    raise ImportError(
        "tieredkv.integrations.vllm needs vLLM 0.26 or newer in the same environment, with the "
        "tiering connector as in 0.26 or 0.33: install `vllm` in one of these versions, or leave "
        f"this module out ({problem})"
    ) from problem

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as vllm_metrics

    _Stats: Any = vllm_metrics.OffloadingConnectorStats
except (ImportError, AttributeError):  # figures are logged instead
    _Stats = None

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.clock import Clock
from tieredkv.engine.store_options import store_options
from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import namespace_digest
from tieredkv.integrations import restore_chooser, vllm_settings
from tieredkv.integrations.ages import Ages
from tieredkv.integrations.announced import Announced
from tieredkv.integrations.chunk_rows import ChunkRows, group_of
from tieredkv.integrations.heads import Head
from tieredkv.integrations.identity import Identity, known_weights
from tieredkv.integrations.lives import Lives
from tieredkv.integrations.offers import Offer, OfferedChunks, Offers
from tieredkv.integrations.prefill_meter import PrefillMeter
from tieredkv.integrations.restore_choice import ANY_LENGTH
from tieredkv.integrations.row_parts import Parts, Span, told_specs
from tieredkv.integrations.row_store import Job, RowStore
from tieredkv.integrations.shared_rows import open_rows
from tieredkv.integrations.tier_request import TierRequest
from tieredkv.integrations.vllm_logging import join_log
from tieredkv.integrations.vllm_spec import check_rows, facts_of, folder_of
from tieredkv.integrations.vllm_stats import METRICS, ConnectorStats, gather
from tieredkv.storage.client.client import StoreClient
from tieredkv.tier import Lent
from tieredkv.types import DTYPE_BYTES, BlockRecord
from tieredkv.units import format_bytes
from tieredkv.wire.arena import HostArena

logger = logging.getLogger(__name__)

_RESULT_FIELDS = {each.name for each in dataclasses.fields(_JobResult)}
_WORD = "tieredkv"
_STORE_SHARE = 2  # writes hold at most this part of the rows, so that loads find room
_TELL_S = 1.0  # figures are told to vLLM so often
_LOG_S = 60.0  # or logged, where vLLM takes none


class TieredKVTier(_Base):  # type: ignore[misc]
    """A secondary tier of vLLM that keeps what requests asked to be kept on disk.

    Args:
        offloading_spec: vLLM's spec of the offloading.
        primary_kv_view: the rows of vLLM's memory, [num_rows, row_bytes].
        tier_type: what vLLM calls this tier.
        config: settings of tieredkv, and: `config_file`, a TOML file with more of them, such as
            retention policies; `weights`, the folder of the weights if that is not the model's;
            `weights_id`, a text that changes with the weights, where there is no such folder or
            something changes them while they are loaded; `prefill_seconds`, how long prompts take
            to compute; `locality`, which vLLM knows from its own tiers.
            Arguments that are not known are named in the log and otherwise ignored.

    Raises:
        ConfigError, StorageError: the disk tier cannot be served as configured.
    """

    if hasattr(vllm_base, "Medium"):
        medium = vllm_base.Medium.STORAGE
    _tells_positions = hasattr(vllm_base.ReqContext, "get_offload_key_position")

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **config: Any
    ) -> None:
        join_log()
        taken = inspect.signature(_Base.__init__).parameters
        detector = {"backpressure_detector": config.pop("backpressure_detector", None)}
        detector = {name: value for name, value in detector.items() if name in taken}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        if "locality" in config and hasattr(vllm_base, "Locality"):
            self.locality = vllm_base.Locality(config["locality"])
        vllm_settings.warn_if_untried(vllm_version)
        settings = vllm_settings.load(config)
        assert settings.disk_dir is not None, "it was checked"
        given_times = restore_chooser.given_times(config.get("prefill_seconds"))
        num_rows, self._row_bytes = vllm_settings.shape_of(primary_kv_view)
        self._num_rows = num_rows
        try:
            told = offloading_spec.config
            specs = told_specs()
            check_rows(told, vllm_version, tells_parts=specs is not None)
            weights = known_weights(
                told.model.name,
                config.get("weights"),
                config.get("weights_id"),
                settings.fingerprint,
            )
            facts = facts_of(
                told, version=vllm_version, weights=weights, row_bytes=self._row_bytes, specs=specs
            )
            self._chunks = ChunkRows(told, self._row_bytes, tells_positions=self._tells_positions)
            folder = folder_of(settings.disk_dir, told.parallel)
        except AttributeError as problem:
            tried = " and ".join(vllm_settings.TRIED)
            what = f"vLLM {vllm_version} does not tell what its chunks are, as {tried} do"
            raise ConfigError(f"{what}: {problem}") from problem
        self._identity = Identity("vllm", facts)
        self._settings = settings
        self._policies = settings.retention_policies()
        self._clock = Clock(settings.clock_offset_file)
        self._ages = Ages(max(1 << 16, 4 * num_rows))
        self._lives = Lives(self._ages, self._policies, self._chunks.spans, self._chunks.windows)
        self._requests: dict[str, TierRequest] = {}
        self._keys: dict[int, tuple[TierRequest, dict[int, bytes]]] = {}  # by job: keys by row
        self._asking: dict[bytes, list[TierRequest]] = {}
        self._offers = Offers()
        self._finished: list[Any] = []
        self._is_told_of_words = False
        self._stats, self._told_at = ConnectorStats(), float("-inf")
        events = getattr(offloading_spec, "kv_events_config", None)
        is_announcing = bool(getattr(events, "enable_kv_cache_events", False))
        most = max(1024, 2 * settings.disk_size // self._row_bytes)
        self._announced = Announced(most) if is_announcing else None
        arena = HostArena.attach(
            open_rows(primary_kv_view), num_rows, self._row_bytes, is_adopted=True
        )
        try:
            vllm_settings.check_budget(settings.disk_size, self._row_bytes)
            options = store_options(
                folder,
                settings,
                element_bytes=DTYPE_BYTES.get(told.model.dtype, 2),
                tells_blocks=is_announcing,
            )
            self._rows = RowStore(
                lambda wake: StoreClient(options, arena, wake=wake),
                arena,
                self._policies,
                max_stored_rows=max(1, num_rows // _STORE_SHARE),
                write_limit=settings.disk_write_limit,
                load_timeout_s=settings.load_timeout,
            )
        except BaseException:
            arena.close()
            raise
        span = self._chunks.spans[self._chunks.first_group]
        meter = PrefillMeter(ComputeRate(chunk=ANY_LENGTH), span)
        self._chooser = restore_chooser.RestoreChooser(
            settings.restore, self._rows, given_times, meter, span, self._row_bytes
        )
        self._rates = restore_chooser.rate_file(
            folder,
            self._rows,
            meter.compute,
            model=told.model.name,
            identity=self._identity.root("").hex(),
            row_bytes=self._row_bytes,
        )
        text = "disk tier of vLLM %s in `%s`: %d rows of %s, weights %s"
        size = format_bytes(self._row_bytes)
        logger.info(text, vllm_version, options.path, num_rows, size, weights[:12])

    def set_parts(self, told: Sequence[Parts]) -> None:
        """Take which bytes of a row each rank writes; see `ChunkRows.tell`."""
        self._chunks.tell(told)

    # --- requests ------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Take the request's claim; a disk policy wants all its chunks, also those of others.

        Otherwise the head of its prompt, which another request may have computed, would be missing
        on disk, and what follows could not be loaded.
        """
        request = self._request(req_context)
        if self._policies.get(request.retention, is_any=True).may_use_disk:
            return _RequestContext(policy=_OffloadPolicy.REQUEST_LEVEL)
        return _RequestContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request, of which no more chunks will be offered."""
        if (request := self._requests.pop(req_context.req_id, None)) is not None:
            request.is_over = True
        self._chooser.forget(req_context.req_id)
        self._chooser.meter.forget(req_context.req_id)

    def _request(self, req_context: Any) -> TierRequest:
        if (request := self._requests.get(req_context.req_id)) is None:
            retention, tenant = self._claim(req_context.kv_transfer_params)
            root, namespace = self._identity.root(tenant), namespace_digest(tenant)
            is_open = not tenant or self._settings.kv_events_namespaces == "all"
            request = TierRequest(
                req_context.req_id, self._identity, retention, root, namespace, is_open
            )
            self._requests[req_context.req_id] = request
        return request

    def _claim(self, params: Mapping[str, Any] | None) -> tuple[str, str]:
        """Return the retention and the tenant that a request names.

        What cannot be understood never lengthens a life: it is told of once.
        """
        told = (params or {}).get(_WORD)
        if told is None:
            return self._settings.default_retention, ""
        try:
            retention = told.get("retention", self._settings.default_retention)
            tenant = told.get("tenant", "")
            if not isinstance(tenant, str):
                raise TypeError(f"`tenant` must be a text, but is {tenant!r}")
            return self._policies.get(retention, is_any=True).name, tenant
        except (AttributeError, TypeError, RequestError) as error:
            if not self._is_told_of_words:
                self._is_told_of_words = True
                text = "`kv_transfer_params.%s` of a request is not understood: %s (told once)"
                logger.warning(text, _WORD, error)
            return "in_memory", ""

    # --- lookups -------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Tell whether a chunk is on disk; the first question is answered in a later step."""
        request = self._request(req_context)
        block_hash = request.hash(key)
        if block_hash not in request.answers:
            if block_hash not in request.asked:
                request.asked.add(block_hash)
                place = self._chunks.position(key, req_context)
                request.note_place(key, place)
                request.shown.note(group_of(key), place, key, block_hash)
                self._asking.setdefault(block_hash, []).append(request)
                self._rows.ask(block_hash)
            return _Verdict.RETRY
        if not self._has(request, block_hash):
            self._note_miss(request, key, req_context)
        elif request.choice is None and request.asked:
            return _Verdict.RETRY  # the head may be longer than is known
        elif self._should_load(request, key, block_hash):
            self._announce(request, {block_hash: key})
            return _Verdict.HIT
        if group_of(key) == self._chunks.first_group:
            request.missed_at = request.shown.place(block_hash)
        return _Verdict.MISS

    def _has(self, request: TierRequest, block_hash: bytes) -> bool:
        """Return whether the disk has a chunk, as far as it has told."""
        times = request.answers.get(block_hash)
        return times is not None and self._clock.now() < times.expires_at

    def _should_load(self, request: TierRequest, key: bytes, block_hash: bytes) -> bool:
        """Return whether the head of a request is loaded; choose at its first chunk.

        What is computed by choice keeps the age of the copy on disk, which stays. It is not found
        to be missing; what follows it is.
        """
        group, place = group_of(key), request.shown.place(block_hash)
        assert place is not None, "it was asked for"
        if request.choice is None:
            has = functools.partial(self._has, request)
            head = request.shown.head(group, place, has, self._chunks.windows, self._num_rows)
            span, num = self._chunks.spans[group], len(head.chunks) + head.num_others
            num_tokens = span * max(head.end, request.shown.end(group))
            request.choice = self._chooser.choose(
                request.id, span * head.begin, span * head.end, num_tokens, [*head.chunks], num
            )
            what = "load" if request.choice.should_load else "compute"
            self._stats.count("tieredkv_restores", 1, what, request.choice.reason)
            if not request.choice.should_load:
                self._stats.count("tieredkv_recomputed_chunks", num)
                self._note_computed(request, head, span * head.end)
            elif len(head.chunks) == self._num_rows:
                request.too_long = group, head.end
        if request.too_long is not None and request.too_long[0] == group:
            # What does not fit would take the rows of what was loaded before, again and again.
            return request.choice.should_load and place < request.too_long[1]
        return request.choice.should_load

    def _note_computed(self, request: TierRequest, head: Head, end: int) -> None:
        """Note that a head is computed by choice, and all behind token `end` as it is missing."""
        for block_hash, key in head.chunks.items():
            if (times := request.answers[block_hash]) is not None:
                self._ages.note(key, times.computed_at)
        if self._tells_positions:
            for group, span in self._chunks.spans.items():
                request.note_computes_from(group.to_bytes(4, "big"), -(-end // span))

    def on_schedule_end(self, context: Any) -> None:
        """Send the questions of this step, all in one message, and note what it began."""
        meter = self._chooser.meter
        meter.note_step()
        for id in getattr(context, "preempted_req_ids", ()):
            meter.forget(id)
            self._chooser.forget(id)
            if (request := self._requests.get(id)) is not None:
                request.choice = request.too_long = request.missed_at = None
        for id in getattr(context, "new_req_ids", ()):
            self._chooser.note_scheduled(id)
            request = self._requests.get(id)
            if request is not None and request.missed_at is not None:
                span, end = meter.chunk_tokens, request.shown.end(self._chunks.first_group)
                meter.begin(id, span * request.missed_at, span * end)
        self._store(self._offers.end_step())
        self._rows.flush()
        self._rates.keep()
        if _Stats is None and time.monotonic() - self._told_at > _LOG_S:
            self._told_at = time.monotonic()
            gather(self._stats, self._rows, self._chooser)
            logger.info("disk tier: %s", self._stats)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Refresh chunks, in the store's order of eviction and by the request's claim."""
        request, now = self._request(req_context), self._clock.now()
        for key in keys:
            block_hash = request.hash(key)
            if (times := request.answers.get(block_hash)) is not None:
                claimed = times.computed_at, request.retention, now
                self._rows.touch(self._rows.claim(block_hash, *claimed))

    def _note_miss(self, request: TierRequest, key: bytes, req_context: Any) -> None:
        """Note that no copy is left of a chunk, so that the request computes it and what follows.

        vLLM loads the head of a prompt only, up to the first chunk that is missing.
        """
        self._ages.forget(key)
        if (position := self._chunks.position(key, req_context)) is not None:
            request.note_computes_from(key[-4:], position)

    # --- jobs ----------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to read chunks into rows."""
        request, keys = self._begin(job_metadata)
        known = {row: request.hash(key) for row, key in keys.items()}
        known = {row: it for row, it in known.items() if request.answers.get(it) is not None}
        lent = [self._lent(request, row, block_hash) for row, block_hash in known.items()]
        self._rows.load(job_metadata.job_id, lent, keys.keys() - known.keys())

    def _lent(self, request: TierRequest, row: int, block_hash: bytes) -> Lent:
        """Return a row for a chunk that is to be loaded.

        vLLM's key of a chunk tells its tokens and all before them. Where it lies in the chain is
        not expected, since a chunk is also offered by requests that have not shown what is before
        it.
        """
        return Lent(
            page_id=row,
            block_hash=block_hash,
            root=request.root,
            parent_hash=None,
            position=None,
            namespace=request.namespace,
            size_bytes=self._row_bytes,
        )

    def submit_store(self, job_metadata: Any) -> None:
        """Take chunks that are to be written, if the request asked for the disk."""
        request, keys = self._begin(job_metadata)
        self._note_offer(request, keys.values())
        left, now, purge = deque(keys.items()), self._clock.now(), self._rows.num_purges
        context = job_metadata.req_context
        self._offers.add(Offer(job_metadata.job_id, request, context, left, now, purge))

    def _store(self, parts: Iterable[OfferedChunks], *, may_wait: bool = True) -> None:
        """Begin to write chunks that were offered, but those that wait for others."""
        for offer, part in parts:
            request = offer.request
            records, gaps, waiting = dict[int, BlockRecord](), dict[int, Sequence[Span]](), []
            may_wait_here = may_wait and (not request.is_over or request.num_offered > 0)
            for row, key in part:
                position = self._chunks.position(key, offer.context)
                if may_wait_here and self._lives.is_early(request, key, position):
                    waiting.append((row, key))
                elif (record := self._record(offer, key, position)) is not None:
                    records[row], gaps[row] = record, self._chunks.gaps(key) or ()
            self._offers.put_back(offer, waiting)
            last = not self._offers.has_left(offer)
            self._rows.store(offer.id, records, gaps=gaps, purge=offer.purge, is_last=last)

    def _store_all(self) -> None:
        """Begin to write all chunks that were offered."""
        self._store(self._offers.take_all())
        self._store(self._offers.take_back(), may_wait=False)

    def _record(self, offer: Offer, key: bytes, position: int | None) -> BlockRecord | None:
        """Return what is written of a chunk, or None if the request did not ask for the disk."""
        request, now = offer.request, offer.at
        if self._chunks.gaps(key) is None:
            return None
        request.note_place(key, position)
        computed_at, deadline = self._lives.of(request, key, position, now)
        if deadline is None or now >= deadline:
            return None
        return BlockRecord(
            block_hash=request.hash(key),
            parent_hash=request.before(key, position),
            root=request.root,
            namespace=request.namespace,
            position=position or 0,
            size_bytes=self._row_bytes,
            retention=request.retention,
            computed_at=computed_at,
            expires_at=deadline,
            last_used=now,
        )

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended, and take the answers to earlier questions."""
        self._take(self._rows.poll())
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Whether vLLM should go on with its steps even if it has no request to compute."""
        return self._rows.has_work or bool(self._finished or self._offers)

    def drain_jobs(self) -> None:
        """Wait until no row is used any more; `get_finished_jobs()` then returns all jobs."""
        self._store_all()
        self._take(self._rows.drain())

    def shutdown(self) -> None:
        """Write what is still to be written, let the worker end and give the rows back."""
        self._rates.close()
        self._store_all()
        self._rows.close(self._settings.drain_timeout)

    def _begin(self, job: Any) -> tuple[TierRequest, dict[int, bytes]]:
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        keys = dict(zip(map(int, rows), map(bytes, job.keys), strict=True))
        request = self._request(job.req_context)
        self._keys[job.job_id] = request, keys
        return request, keys

    def _note_offer(self, request: TierRequest, keys: Iterable[bytes]) -> None:
        """Note which of the chunks that a request was told to compute are there now."""
        if request.missed_at is None:
            return
        firsts = (key for key in keys if group_of(key) == self._chunks.first_group)
        hashes = (request.hash(key) for key in firsts)
        places = [it for each in hashes if (it := request.shown.place(each)) is not None]
        if places:
            meter = self._chooser.meter
            meter.note_offer(request.id, meter.chunk_tokens * (max(places) + 1))

    def _take(self, jobs: Iterable[Job]) -> None:
        verdicts = Counter[str]()
        for block_hash, times in self._rows.take_answers().items():
            for request in self._asking.pop(block_hash, ()):
                request.asked.discard(block_hash)
                request.answers[block_hash] = times
                verdicts["miss" if times is None else "hit"] += 1
        for verdict, num in verdicts.items():
            self._stats.count("tieredkv_lookups", num, verdict)
        for job in jobs:
            request, keys = self._keys[job.id]
            for reason in job.failed.values():
                name = "tieredkv_failed_loads" if job.is_load else "tieredkv_failed_stores"
                self._stats.count(name, 1, reason)
            num_bytes = job.num_moved * self._row_bytes
            if job.is_load:
                self._take_load(job, request, keys)
                self._stats.count("tieredkv_loaded_bytes", num_bytes)
            else:
                self._stats.count("tieredkv_stored_bytes", num_bytes)
                for row, record in job.records.items():
                    request.answers.pop(record.block_hash, None)
                    if row not in job.failed:
                        self._announce(request, {record.block_hash: keys[row]})
            self._end(job.id, job)
        left = self._rows.take_left()
        if self._announced is not None:
            self._announced.remove(left.hashes)
            if left.is_unknown:
                self._announced.remove_all()

    def _take_load(self, job: Job, request: TierRequest, keys: Mapping[int, bytes]) -> None:
        lost = [request.hash(keys[row]) for row in job.failed]
        request.answers.update(dict.fromkeys(lost))
        if self._announced is not None:
            self._announced.remove(lost)
        for row, life in job.loaded.items():
            self._ages.note(keys[row], life.computed_at)
            claimed = life.computed_at, request.retention, self._clock.now()
            self._rows.touch(self._rows.claim(request.hash(keys[row]), *claimed))
        num_bytes = len(job.loaded) * self._row_bytes
        self._chooser.note_read(request.id, num_bytes, job.ended_at, ok=not job.failed)

    def _end(self, id: int, job: Job | None = None) -> None:
        """Report the end of a job, with all that this version of vLLM wants to know."""
        _, keys = self._keys.pop(id)
        told: dict[str, Any] = {"job_id": id, "success": job is None or not job.failed}
        if job is not None and job.is_load and job.failed:
            told["successful_keys"] = tuple(keys[row] for row in job.loaded) or None
        if job is not None:
            told["transfer_time"] = job.seconds
            told["transfer_bytes"] = job.num_moved * self._row_bytes
        told = {name: value for name, value in told.items() if name in _RESULT_FIELDS}
        self._finished.append(_JobResult(**told))

    # --- what is told --------------------------------------------------------------------------

    def _announce(self, request: TierRequest, chunks: Mapping[bytes, bytes]) -> None:
        """Announce chunks that the disk has, unless they are a tenant's."""
        if self._announced is not None and request.is_announced:
            for block_hash, key in chunks.items():
                self._announced.add(block_hash, key)

    def take_events(self) -> Iterable[Any]:
        """Yield what the disk has got and lost, if vLLM publishes KV cache events."""
        for keys, is_removed in [] if self._announced is None else self._announced.take():
            told: dict[str, Any] = {
                "keys": keys,
                "medium": getattr(self, "medium", "STORAGE"),
                "removed": is_removed,
                "locality": getattr(self, "locality", None),
                "ownership": _WORD,
                "removal_expected": True,
            }
            fields = {each.name for each in dataclasses.fields(vllm_base.OffloadingEvent)}
            yield vllm_base.OffloadingEvent(**{name: told[name] for name in told.keys() & fields})

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tier's metrics, as vLLM describes metrics."""
        kinds: dict[str, Any] = {
            "counter": vllm_base.OffloadingCounterMetadata,
            "gauge": vllm_base.OffloadingGaugeMetadata,
        }
        return {
            name: kinds[metric.kind](documentation=metric.text, labelnames=metric.labels)
            for name, metric in METRICS.items()
        }

    def get_stats(self) -> Any:
        """Return what was counted since the last call, once a second."""
        if _Stats is None or time.monotonic() - self._told_at < _TELL_S:
            return None
        self._told_at = time.monotonic()
        gather(self._stats, self._rows, self._chooser)
        return self._stats.tell(_Stats())
