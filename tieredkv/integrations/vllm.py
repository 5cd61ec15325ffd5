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
"""

import dataclasses
import inspect
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

try:
    import vllm.v1.kv_offload.base as vllm_base
    import vllm.v1.kv_offload.tiering.base as vllm_tiering
    from vllm.version import __version__ as vllm_version
except ImportError as problem:
    raise ImportError(
        "tieredkv.integrations.vllm needs vLLM 0.26 or newer, with its tiering connector, in the "
        f"same environment: install `vllm`, or leave this module out ({problem})"
    ) from problem

from tieredkv.clock import Clock
from tieredkv.config import Settings, load_settings
from tieredkv.engine.store_options import store_options
from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import namespace_digest
from tieredkv.integrations.ages import Ages
from tieredkv.integrations.identity import Identity, weights_identity
from tieredkv.integrations.row_store import Job, RowStore
from tieredkv.integrations.shared_rows import open_rows
from tieredkv.integrations.vllm_spec import facts_of, folder_of, group_spans
from tieredkv.storage.host import HostArena
from tieredkv.storage.lmdb_store import minimum_budget_bytes
from tieredkv.types import DTYPE_BYTES, BlockRecord
from tieredkv.units import format_bytes

logger = logging.getLogger(__name__)

_Base: Any = vllm_tiering.SecondaryTierManager
_Verdict: Any = vllm_base.LookupResult
_JobResult: Any = vllm_tiering.JobResult
_RESULT_FIELDS = {each.name for each in dataclasses.fields(_JobResult)}

_SETTINGS = (
    *("disk_dir", "disk_size", "disk_sync", "disk_compression", "disk_write_limit"),
    *("sweep_interval", "load_timeout", "drain_timeout", "default_retention", "fingerprint"),
)
"""The settings of tieredkv that mean something here."""

_OWN = ("config_file", "weights", "weights_id", "locality")
_WORD = "tieredkv"
_STORE_SHARE = 2  # writes hold at most this part of the rows, so that loads find room


@dataclass(eq=False, slots=True)
class _Request:
    """What the tier knows of one request.

    Attributes:
        retention: the policy that it asked for.
        root, namespace: of the tenant's chunks.
        asked: chunks that are being looked up.
        answers: what was found, by chunk; None for a miss.
        by_place: chunks by group and position, as far as the request has shown them.
        computes_from: the position from which on it computes its chunks itself, by group.
    """

    retention: str
    root: bytes
    namespace: bytes
    asked: set[bytes] = field(default_factory=set)
    answers: dict[bytes, BlockRecord | None] = field(default_factory=dict)
    by_place: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    computes_from: dict[bytes, int] = field(default_factory=dict)


class TieredKVTier(_Base):  # type: ignore[misc]
    """A secondary tier of vLLM that keeps what requests asked to be kept on disk.

    Args:
        offloading_spec: vLLM's spec of the offloading.
        primary_kv_view: the rows of vLLM's memory, [num_rows, row_bytes].
        tier_type: what vLLM calls this tier.
        config: settings of tieredkv, and: `config_file`, a TOML file with more of them, such as
            retention policies; `weights`, the folder of the weights if that is not the model's;
            `weights_id`, a text that changes with the weights, where there is no such folder;
            `locality`, which vLLM knows from its own tiers.
            Arguments that are not known are named in the log and otherwise ignored.

    Raises:
        ConfigError, StorageError: the disk tier cannot be served as configured.
    """

    if hasattr(vllm_base, "Medium"):
        medium = vllm_base.Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **config: Any
    ) -> None:
        taken = inspect.signature(_Base.__init__).parameters
        detector = {"backpressure_detector": config.pop("backpressure_detector", None)}
        detector = {name: value for name, value in detector.items() if name in taken}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        if "locality" in config and hasattr(vllm_base, "Locality"):
            self.locality = vllm_base.Locality(config["locality"])
        settings = _load(config)
        assert settings.disk_dir is not None, "it was checked"
        num_rows, self._row_bytes = _shape(primary_kv_view)
        told = offloading_spec.config
        weights = config.get("weights_id") or weights_identity(
            told.model.name, config.get("weights"), settings.fingerprint
        )
        facts = facts_of(told, version=vllm_version, weights=weights, row_bytes=self._row_bytes)
        self._identity = Identity("vllm", facts)
        self._spans = group_spans(told)
        self._settings = settings
        self._policies = settings.retention_policies()
        self._clock = Clock(settings.clock_offset_file)
        self._ages = Ages(max(1 << 16, 4 * num_rows))
        self._requests: dict[str, _Request] = {}
        self._keys: dict[int, tuple[_Request, dict[int, bytes]]] = {}  # by job: keys by row
        self._asking: dict[bytes, list[_Request]] = {}
        self._finished: list[Any] = []
        self._is_told_of_words = False
        arena = HostArena.adopt(open_rows(primary_kv_view), num_rows, self._row_bytes)
        try:
            _check_budget(settings.disk_size, self._row_bytes)
            options = store_options(
                folder_of(settings.disk_dir, told.parallel),
                settings,
                element_bytes=DTYPE_BYTES.get(told.model.dtype, 2),
            )
            self._rows = RowStore(
                options,
                arena,
                self._policies,
                max_stored_rows=max(1, num_rows // _STORE_SHARE),
                load_timeout_s=settings.load_timeout,
            )
        except BaseException:
            arena.close()
            raise
        text = "disk tier of vLLM %s in `%s`: %d rows of %s, weights %s"
        size = format_bytes(self._row_bytes)
        logger.info(text, vllm_version, options.path, num_rows, size, weights[:12])

    # --- requests ------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Take the request's claim; a disk policy wants all its chunks, also those of others.

        Otherwise the head of its prompt, which another request may have computed, would be missing
        on disk, and what follows could not be loaded.
        """
        request = self._request(req_context)
        if self._policies.get(request.retention, is_any=True).may_use_disk:
            policy = vllm_base.OffloadPolicy.REQUEST_LEVEL
            return vllm_base.RequestOffloadingContext(policy=policy)
        return vllm_base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request."""
        self._requests.pop(req_context.req_id, None)

    def _request(self, req_context: Any) -> _Request:
        if (request := self._requests.get(req_context.req_id)) is None:
            retention, tenant = self._claim(req_context.kv_transfer_params)
            root, namespace = self._identity.root(tenant), namespace_digest(tenant)
            request = _Request(retention, root, namespace)
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
        block_hash = self._name(request, key, req_context)
        if block_hash not in request.answers:
            if block_hash not in request.asked:
                request.asked.add(block_hash)
                self._asking.setdefault(block_hash, []).append(request)
                self._rows.ask(block_hash)
            return _Verdict.RETRY
        record = request.answers[block_hash]
        if record is not None and self._clock.now() < record.expires_at:
            return _Verdict.HIT
        self._note_miss(request, key, req_context)
        return _Verdict.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Send the questions of this step, all in one message."""
        self._rows.flush()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Refresh chunks, in the store's order of eviction and by the request's claim."""
        request, now = self._request(req_context), self._clock.now()
        for key in keys:
            block_hash = self._identity.block_hash(request.root, key)
            if (record := request.answers.get(block_hash)) is not None:
                self._rows.touch(self._rows.claim(record, request.retention, now))

    def _note_miss(self, request: _Request, key: bytes, req_context: Any) -> None:
        """Note that no copy is left of a chunk, so that the request computes it and what follows.

        vLLM loads the head of a prompt only, up to the first chunk that is missing.
        """
        self._ages.forget(key)
        if (position := self._position(key, req_context)) is not None:
            group = key[-4:]
            first = request.computes_from.get(group, position)
            request.computes_from[group] = min(first, position)

    # --- jobs ----------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to read chunks into rows."""
        request, keys = self._begin(job_metadata)
        records = dict[int, BlockRecord]()
        for row, key in keys.items():
            found = request.answers.get(self._identity.block_hash(request.root, key))
            if found is not None:
                records[row] = found
        self._rows.load(job_metadata.job_id, records, keys.keys() - records.keys())

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write chunks from rows, if the request asked for the disk."""
        request, keys = self._begin(job_metadata)
        now = self._clock.now()
        records = dict[int, BlockRecord]()
        for row, key in keys.items():
            block_hash = self._name(request, key, job_metadata.req_context)
            position = self._position(key, job_metadata.req_context)
            computed_at = self._computed_at(request, key, position, now)
            times = computed_at, now
            deadline = self._policies.disk_deadline((request.retention,), *times)
            if deadline is None or now >= deadline:
                continue
            before = request.by_place.get((key[-4:], (position or 0) - 1))
            records[row] = BlockRecord(
                block_hash=block_hash,
                parent_hash=before or request.root,
                root=request.root,
                namespace=request.namespace,
                position=position or 0,
                size_bytes=self._row_bytes,
                retention=request.retention,
                computed_at=computed_at,
                expires_at=deadline,
                last_used=now,
            )
        if records:
            self._rows.store(job_metadata.job_id, records)
        else:
            self._end(job_metadata.job_id)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended, and take the answers to earlier questions."""
        self._take(self._rows.poll())
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Whether vLLM should go on with its steps even if it has no request to compute."""
        return self._rows.has_work or bool(self._finished)

    def drain_jobs(self) -> None:
        """Wait until no row is used any more; `get_finished_jobs()` then returns all jobs."""
        self._take(self._rows.drain())

    def shutdown(self) -> None:
        """Write what is still to be written, let the worker end and give the rows back."""
        self._rows.close(self._settings.drain_timeout)

    def _begin(self, job: Any) -> tuple[_Request, dict[int, bytes]]:
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        keys = dict(zip(map(int, rows), map(bytes, job.keys), strict=True))
        request = self._request(job.req_context)
        self._keys[job.job_id] = request, keys
        return request, keys

    def _take(self, jobs: Iterable[Job]) -> None:
        for block_hash, record in self._rows.take_answers().items():
            for request in self._asking.pop(block_hash, ()):
                request.asked.discard(block_hash)
                request.answers[block_hash] = record
        for job in jobs:
            request, keys = self._keys[job.id]
            for row in job.failed:
                if job.is_load:
                    request.answers[self._identity.block_hash(request.root, keys[row])] = None
            for row, record in job.loaded.items():
                self._ages.note(keys[row], record.computed_at)
                self._rows.touch(self._rows.claim(record, request.retention, self._clock.now()))
            if not job.is_load:
                for record in job.records.values():
                    request.answers.pop(record.block_hash, None)
            self._end(job.id, job)

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

    # --- what a chunk is -----------------------------------------------------------------------

    def _name(self, request: _Request, key: bytes, req_context: Any) -> bytes:
        """Return the hash of a chunk, and remember its place in the request."""
        block_hash = self._identity.block_hash(request.root, key)
        if (position := self._position(key, req_context)) is not None:
            request.by_place[key[-4:], position] = block_hash
        return block_hash

    def _position(self, key: bytes, req_context: Any) -> int | None:
        """Return the place of a chunk in its chain; None where vLLM does not tell it, as in 0.26.

        Such a chunk is stored as a chain of its own.
        """
        if not hasattr(req_context, "get_offload_key_position"):
            return None
        end = req_context.get_offload_key_position(key)
        span = self._spans.get(int.from_bytes(key[-4:], "big"))
        return None if end is None or span is None else max(0, -(-end // span) - 1)

    def _computed_at(
        self, request: _Request, key: bytes, position: int | None, now: float
    ) -> float:
        """Return since when a chunk that is offered is there.

        Its first offer counts, whoever offers it again. Only if the request has computed the chunk
        itself after its copies had expired does a new life begin.
        """
        first = self._ages.note(key, now)
        is_computed = position is not None and position >= request.computes_from.get(
            key[-4:], position + 1
        )
        deadline = self._policies.disk_deadline((request.retention,), first, now)
        if is_computed and deadline is not None and now >= deadline:
            self._ages.forget(key)
            first = self._ages.note(key, now)
        return first


def _load(config: Mapping[str, Any]) -> Settings:
    """Return the settings in the arguments of a tier.

    Raises:
        ConfigError: one of them is malformed, or there is no folder.
    """
    known = {*_SETTINGS, *_OWN}
    if others := sorted(config.keys() - known):
        text = "arguments of the tier that tieredkv does not know are ignored: %s"
        logger.warning(text, ", ".join(others))
    arguments = {name: config[name] for name in _SETTINGS if name in config}
    file = config.get("config_file")
    settings = load_settings(arguments=arguments, config_path=file).settings
    if settings.disk_dir is None:
        raise ConfigError("the tier needs `disk_dir`, the folder of its store on disk")
    return settings


def _shape(view: memoryview) -> tuple[int, int]:
    """Return the number of rows and the bytes of each.

    Raises:
        ConfigError: there is not even one.
    """
    num_rows, row_bytes = view.shape if view.ndim == 2 and view.shape else (0, 0)
    if not num_rows or not row_bytes:
        what = "`cpu_bytes_to_use` does not hold one chunk of vLLM's KV cache"
        raise ConfigError(f"{what}; make it larger, or `blocks_per_chunk` smaller")
    return num_rows, row_bytes


def _check_budget(size_bytes: int, row_bytes: int) -> None:
    """Refuse a budget in which no chunk can be stored and replaced.

    Raises:
        ConfigError: it is too small.
    """
    if size_bytes < (least := minimum_budget_bytes(row_bytes)):
        what = f"`disk_size` = {format_bytes(size_bytes)} is too small for chunks of "
        least_text = f"it must be at least {format_bytes(least)}"
        raise ConfigError(f"{what}{format_bytes(row_bytes)}; {least_text}")
