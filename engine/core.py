"""The engine: takes requests and returns tokens, one step at a time.

It drives the parts that `parts` makes, and releases them. It knows no text and no HTTP. Everything
runs on the thread that calls `step`; only `wake` may be called from others.
"""

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from tieredkv.config import Settings
from tieredkv.engine.chains import Chains
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, TokenOutput, failed
from tieredkv.engine.grammars import Compiled, Compiler, Grammars, Matcher
from tieredkv.engine.kv_digests import KVDigests
from tieredkv.engine.parts import Build, build_parts, known_model
from tieredkv.engine.prompt import pack_prompt
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.prompt_scores import score_prompt
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState, Sampling, sample
from tieredkv.engine.slices import Slices
from tieredkv.engine.step_buffers import StepOutput
from tieredkv.engine.step_plan import ScheduledRow
from tieredkv.engine.tier_stats import TierStats
from tieredkv.engine.verbs import Verbs
from tieredkv.errors import BlocksLostError, RequestError
from tieredkv.types import Progress, ignore_progress

logger = logging.getLogger(__name__)

IDLE_DEVICE_POLL_S = 0.00005
"""While the device computes nothing, the thread looks so often whether a copy has ended: copies
between VRAM and host memory wake nobody.
"""

BUSY_DEVICE_POLL_S = 0.0005
"""While the device computes, and no step is due yet, the thread looks so often whether a copy has
ended.
"""

ISSUE_AHEAD_S = 0.015
"""A step is issued so long before the device has computed the last one, and not sooner: requests
that come meanwhile, and blocks that are loaded meanwhile, have a part in it.
"""

ISSUE_AHEAD_SHARE = 0.05
"""By this share of the steps that the device has yet to compute, the next one is issued earlier
still: they may end sooner than expected.
"""

PLAN_AGAIN_S = 0.005
"""The longest time until the next plan while the cache waits for something."""

TOUCH_AGAIN_S = 10.0
"""The blocks of a request that ends so long after they were refreshed are refreshed again."""


class _Launched(NamedTuple):
    """A step whose tokens the host has not seen yet.

    Attributes:
        rows: the rows that sample a token.
        sampling: of those.
        logits: [num_rows, vocab_size] of those, on the device; None if nobody wants them.
    """

    rows: list[ScheduledRow]
    sampling: Sampling
    logits: torch.Tensor | None


class EngineCore:
    """One model with its scheduler and its tiered cache.

    Args:
        settings: sizes, tiers, retention, scheduling.
        progress: told about loading, profiling and pinning.
        build: makes the parts that the engine drives.

    Attributes:
        parts: what it is made of, for benches and tests that look inside.
        cache: the tiers, as requests use them.
        operations: the tiers, as operators use them.
        verbs: carries out what an operator asks.
        tier_stats: reads what the engine reports.
        kv_digests: reads what VRAM holds of a prompt.
        on_logits: called with the request's id and the logits of each new token, [vocab_size] on
            the device, which are the caller's to keep; None for nobody.

    Raises:
        ConfigError: a budget is smaller than one block, or a setting does not fit the model.
        ModelError: the model cannot be loaded or is not supported.
        StorageError: the disk tier's folder is not usable; nothing in it was changed.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        progress: Progress = ignore_progress,
        build: Build = build_parts,
    ) -> None:
        self.settings = settings
        self._wake = threading.Event()
        self._requests: dict[str, Request] = {}
        self._compiling: dict[Request, Future[Compiled]] = {}  # of requests not yet queued
        self._outputs: list[TokenOutput] = []
        self._ended: list[Request] = []  # that hold their blocks until the next step
        self._launched: _Launched | None = None
        self._seeds = random.Random(settings.seed)
        self._is_closed = self._is_issued = self._is_stalled = False
        self._slack_s = 0.0  # for so long there is no need to issue the next step
        self.on_logits: Callable[[str, torch.Tensor], None] | None = None
        with contextlib.ExitStack() as stack:
            self.parts = parts = build(settings, stack, progress=progress, wake=self.wake)
            self.model, self.kv_spec = parts.model, parts.spec
            self.scheduler, self.cache = parts.scheduler, parts.cache
            self._runner, self._timer, self._rate_file = parts.runner, parts.timer, parts.rate_file
            self._choice, self._max_model_len = parts.choice, parts.max_model_len
            fingerprint = parts.model.fingerprint
            self._chains = Chains(settings, parts.spec, fingerprint, parts.tiers.clock)
            self.operations = self.cache.operations
            self.kv_digests = KVDigests(self._chains, self.operations, parts.device_blocks)
            self.tier_stats = TierStats(
                self.operations, self.scheduler, self._timer, self._max_model_len
            )
            slices = Slices()
            prompts = PromptInspections(self.operations, self._chains, slices)
            known = known_model(settings, parts.model, parts.spec)
            self.verbs = Verbs(self.operations, self.tier_stats, prompts, known, slices)
            self.verbs.give_shares(settings.tenant_shares)
            self._grammars = Grammars(self._make_compiler, self.wake)
            stack.callback(self._grammars.close)
            self._stack = stack.pop_all()

    @property
    def info(self) -> EngineInfo:
        """What senders of requests are told; it changes when the store's worker does."""
        disk = self.operations.disk
        return EngineInfo(
            model=next(iter(self.settings.served_names), self.model.name),
            max_model_len=self._max_model_len,
            vocab_size=self.model.vocab_size,
            block_size=self.scheduler.block_size,
            eos_token_ids=sorted(self.model.eos_token_ids),
            worker_pid=disk.pid if disk else None,
            disk_trouble=(disk.why or None) if disk and not disk.is_open else None,
        )

    def add_request(self, asked: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it is malformed or too long.
        """
        assert asked.request_id not in self._requests, asked.request_id
        vocab_size = self.model.vocab_size
        max_len, max_tokens = self._max_model_len, asked.params.max_tokens
        packed = pack_prompt(asked.prompt_token_ids, max_len, vocab_size, max_tokens=max_tokens)
        asked.params.check_vocabulary(vocab_size)
        sampler = SamplerState(
            asked.params,
            self._seeds.getrandbits(63),
            defaults=self._choice,
            eos_token_ids=self.model.eos_token_ids,
            prompt_token_ids=packed,
        )
        most_tokens = max(1, min(max_tokens, max_len - len(packed)))
        request = Request(asked, self._chains.make(asked, packed), sampler, most_tokens)
        self._requests[asked.request_id] = request
        if asked.grammar is None:
            self.scheduler.add(request)
        else:
            self._compiling[request] = self._grammars.compile(asked.grammar)

    def check_room(self, tenant: str) -> None:
        """Refuse a request if too many wait already, for their grammars or in the queue.

        Raises:
            RequestError: see `RequestQueue.check_room`.
        """
        most = self.settings.max_num_queued_reqs
        self.scheduler.waiting.check_room(tenant, most, self._compiling.keys())

    def abort(self, request_id: str) -> None:
        """Cancel a request and release what it holds; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
            self._release_ended()
            self._outputs.append(TokenOutput(request_id=request_id, finish_reason="abort"))

    def abort_all(self) -> None:
        """Cancel every request."""
        for request_id in list(self._requests):
            self.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a `step` has anything to do: requests, outputs, or blocks being moved."""
        is_busy = bool(self._requests or self._outputs or self._ended) or self._launched is not None
        return is_busy or not self.cache.is_idle

    def step(self) -> list[TokenOutput]:
        """Issue one step, then return the outputs of the step before it.

        The device computes the new step while the host takes in the outputs. The list is empty
        after the first step, while requests wait for blocks, and while the device has enough to do.
        While steps are short, no step is issued ahead, so that the caller can add new requests
        before each step.

        What a request held is released by the next call, so that no output waits for it.
        """
        self._release_ended()
        self._queue_compiled()
        if self._is_issued and self.scheduler.has_short_steps:
            self._is_issued = False
            self._runner.synchronize()
            self._collect()
        else:
            self._take_in()
            if self._slack_s > 0:
                self.scheduler.prepare()
                self.cache.refresh()
                self.cache.pump()
            else:
                self._issue()
        self.cache.publish()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_in(self) -> None:
        """Take in what has ended, and find out how soon the next step has to be issued."""
        self.cache.poll(may_start_early=self._launched is None)
        self.verbs.answer_control()
        if self._rate_file is not None:
            self._rate_file.keep()
        busy_s = self.scheduler.busy_s = self._timer.busy_s()
        self._slack_s = busy_s - ISSUE_AHEAD_S - ISSUE_AHEAD_SHARE * self._timer.issued_s

    def _issue(self) -> None:
        """Issue the next step; while the device computes it, take in the tokens of the last one."""
        rows = self._launched.rows if self._launched is not None else ()
        must_see = any(request.sampler.needs_history for request, _ in rows)
        if must_see or self.scheduler.wants_preemption:  # else it runs ahead
            self._collect()
            self._release_ended()
        scheduled = self.scheduler.schedule(may_preempt=self._launched is None)
        launched = self._launch(scheduled) if scheduled else None
        has_room = self.scheduler.make_room()  # this can take longer than a step
        self.cache.refresh()
        self.cache.pump()
        self._collect()
        self._launched = launched
        self._is_issued = bool(scheduled)
        self._is_stalled = not (scheduled or has_room or self.scheduler.wants_preemption)

    def wait(self, timeout_s: float) -> None:
        """Wait for a `wake`, for a copy that ends, or for the timeout; return at once if busy."""
        wakeup_at = time.monotonic() + min(timeout_s, self._wakeup_s())
        poll_s = BUSY_DEVICE_POLL_S if self._slack_s > 0 else IDLE_DEVICE_POLL_S
        while not self._wake.is_set() and (left_s := wakeup_at - time.monotonic()) > 0:
            if self.cache.has_copied:
                break
            self._wake.wait(min(left_s, poll_s) if self.cache.is_copying else left_s)
        self._wake.clear()

    def _wakeup_s(self) -> float:
        """Return in how many seconds there is something to do, if nothing wakes the thread.

        Blocks that expire do not count. The caller's timeout bounds how late they are dropped.
        """
        cache = self.cache
        if self.verbs.slices.has_more or self._ended:
            return 0.0
        if self._slack_s > 0:  # no step is due
            polls = cache.is_recalling or cache.has_more or cache.is_copying
            return BUSY_DEVICE_POLL_S if polls else min(self._slack_s, PLAN_AGAIN_S)
        can_step = self._launched is not None or (self._requests and not self._is_stalled)
        if can_step or cache.has_more:
            return 0.0
        held_until = self.scheduler.held_until
        held_s = held_until - time.monotonic() if held_until else math.inf
        return min(held_s, PLAN_AGAIN_S if cache.is_waiting else math.inf)

    def wake(self) -> None:
        """End a `wait`; any thread may call it."""
        self._wake.set()

    def close(self, *, progress: Progress = ignore_progress) -> None:
        """Abort requests, write blocks that are owed to the disk, and release everything.

        Calling it twice is fine.

        Raises:
            BlocksLostError: blocks that were promised to the disk are lost because the store
                failed; blocks that `drain_timeout` left no time for do not count. Everything is
                released nevertheless.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.abort_all()
        self._release_ended()
        with self._stack:
            # What an operator evicts now is not written any more.
            lost = self.cache.drain(
                self.settings.drain_timeout, progress=progress, meanwhile=self.verbs.answer_control
            )
        if lost.num_late:
            text = "%d blocks were not written to disk within `drain_timeout` (%g s) and are lost"
            logger.warning(text, lost.num_late, self.settings.drain_timeout)
        if lost.num_refused:
            what = f"{lost.num_refused} blocks that were promised to the disk are lost"
            raise BlocksLostError(f"{what}, because storing failed: {lost.why}")

    # Inside

    def _launch(self, scheduled: list[ScheduledRow]) -> _Launched | None:
        """Issue a step; while the device computes it, do the work that does not need its tokens."""
        batch = [row for _, row in scheduled]
        ending = (request.chain for request, row in scheduled if row.needs_logits)
        late_event = self.cache.begin_step(
            self._timer.issue_s(batch),
            ending,
            lambda: self._timer.busy_s() + self._timer.predict_s(batch),
        )
        self._timer.begin()
        output = self._runner.execute(batch, late_event)
        self.cache.end_step()
        self._timer.end(batch, teaches=late_event is None)
        rows = [each for each in scheduled if each.row.needs_logits]
        if any(row.all_logits for row in batch):
            output = score_prompt(scheduled, output)
        if any(request.sampler.is_constrained for request, _ in rows):
            # A grammar needs the token before; the device computes this step meanwhile.
            self._complete(scheduled)
            self._collect()
            return self._choose(rows, output)
        launched = self._choose(rows, output)
        self._complete(scheduled)
        return launched

    def _choose(self, rows: list[ScheduledRow], output: StepOutput) -> _Launched | None:
        """Have the device choose the next tokens of the rows that need one."""
        if not rows:
            return None
        states = [request.sampler for request, _ in rows]
        sampling = sample(output.logits, states, output.tokens)
        if sampling.token_ids is not output.tokens:
            self._runner.keep_tokens(output, sampling.token_ids)
        # The next step reuses their memory before anyone has seen them.
        logits = output.logits.clone() if self.on_logits is not None else None
        return _Launched(rows, sampling, logits)

    def _complete(self, scheduled: list[ScheduledRow]) -> None:
        """Do the work on a step that needs none of its tokens."""
        for each in scheduled:
            self.scheduler.complete(each)
        self.scheduler.predict(self._timer.busy_s)
        for request, row in scheduled:
            if row.needs_logits and request.usage is None:
                num_recomputed = int(row.write_from > row.start)
                request.usage = request.measure_usage(
                    self.kv_spec.block_size, num_recomputed, self.cache.why_missed
                )

    def _collect(self) -> None:
        """Take in the tokens of the step that was issued before, if there is one."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        tokens = launched.sampling.tokens()
        for index, ((request, _), token) in enumerate(zip(launched.rows, tokens, strict=True)):
            if not request.is_running:  # it ended while this token was computed ahead
                continue
            if self.on_logits is not None and launched.logits is not None:
                self.on_logits(request.request_id, launched.logits[index])
            is_first = not request.num_output_tokens
            if is_first:
                request.note_first_token(self.cache.note_first_token(request.chain))
            if not request.touched_at:
                self._touch(request)
            request.append(token.token_id)
            matcher = request.sampler.matcher
            if matcher is not None and matcher.fault:
                why = f"The answer cannot follow its form: {matcher.fault}."
                logger.error("request %s: %s", request.request_id, why)
                self._fail(request, RequestError(why, code="constraint_failed", status=500))
                continue
            self.scheduler.seal_full_blocks(request)
            finish_reason = self._finish_reason(request, token.token_id)
            logprobs = request.take_scores() if is_first else []
            if token.logprob is not None and request.asked.params.max_tokens:
                logprobs.append(token)
            output = TokenOutput(
                request_id=request.request_id,
                token_ids=[token.token_id] if request.asked.params.max_tokens else [],
                logprobs=logprobs or None,
                finish_reason=finish_reason,
                usage=request.usage if is_first or finish_reason else None,
            )
            self._outputs.append(output)
            if finish_reason is not None:
                if time.monotonic() - request.touched_at > TOUCH_AGAIN_S:
                    self._touch(request)
                self._finish(request)

    def _touch(self, request: Request) -> None:
        request.touched_at = time.monotonic()
        self.cache.touch(request.chain)

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        state, num_tokens = request.sampler, request.num_output_tokens
        if state.matcher is not None and state.matcher.is_done:
            return "stop"
        if num_tokens >= state.params.min_tokens and token_id in state.end_token_ids:
            return "stop" if state.params.max_tokens else "length"
        return "length" if num_tokens >= request.max_output_tokens else None

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        compiling = self._compiling.pop(request, None)
        if compiling is None:
            self._ended.append(request)
        else:
            compiling.cancel()

    def _release_ended(self) -> None:
        """Release what the requests hold that have ended."""
        ended, self._ended = self._ended, []
        for request in ended:
            self.scheduler.remove(request)

    def _fail(self, request: Request, error: RequestError) -> None:
        self._finish(request)
        self._outputs.append(failed(request.request_id, error))

    def _make_compiler(self) -> Compiler:
        model = self.model
        return Compiler(model.tokenizer, model.vocab_size, model.eos_token_ids)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammars have been compiled; the others of them fail."""
        for request in [each for each, it in self._compiling.items() if it.done()]:
            try:
                request.sampler.matcher = Matcher(self._compiling[request].result())
            except Exception as error:  # whatever it is, only this request fails with it
                if not isinstance(error, RequestError):
                    logger.exception("a grammar could not be compiled")
                    error = RequestError("The grammar could not be compiled.", status=500)
                self._fail(request, error)
            else:
                del self._compiling[request]
                self.scheduler.add(request)
