"""Chooses tokens from logits, for each request by its own parameters and its own random numbers.

The random number of an output token is a function of the request's seed and the token's position
in the output, so that neither the batch around it nor a preemption changes a seeded answer. It
knows nothing of text.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tieredkv.engine.engine_messages import TokenLogprob
from tieredkv.engine.grammars import Matcher, allowed_tokens
from tieredkv.engine.sampling_params import SamplingParams, TokenChoice
from tieredkv.kernels.small_copies import to_device, to_host

_MAX_GROUP_NUMEL = 1 << 22
"""Logits that are turned into probabilities at a time: 32 MiB a tensor."""


class SamplerState:
    """One request's sampling state between its tokens; a preemption does not change it.

    Attributes:
        params: as the user asked.
        choice: how tokens are chosen, by the model's defaults where the user did not say.
        seed: the user's, or one drawn for the request.
        end_token_ids: tokens that end the output, not to be chosen before `min_tokens`.
        seen_token_ids: tokens of prompt and output, kept if `repetition_penalty` is set.
        output_counts: how often each token is in the output.
        num_output_tokens: tokens chosen so far, those that the host has not seen yet included.
        matcher: follows the grammar of the answer; None for an answer without one.
    """

    def __init__(
        self,
        params: SamplingParams,
        request_seed: int,
        *,
        defaults: TokenChoice = TokenChoice(),  # noqa: B008 (it never changes)
        eos_token_ids: Collection[int] = (),
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        """Begin a request; `request_seed` counts if the parameters have no seed."""
        self.params, self.choice = params, params.choice(defaults)
        self.seed = request_seed if params.seed is None else params.seed
        self.end_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.seen_token_ids = set(prompt_token_ids if self.choice.repetition_penalty != 1.0 else ())
        self.output_counts = Counter[int]()
        self.num_output_tokens = 0
        self.matcher: Matcher | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the next token cannot be chosen before the host has seen the last one."""
        params = self.params
        is_penalised = params.presence_penalty or params.frequency_penalty
        return bool(is_penalised) or self.choice.repetition_penalty != 1.0

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says which tokens may come next; it must have seen all before."""
        return self.matcher is not None and not self.matcher.is_done

    @property
    def banned_token_ids(self) -> Collection[int]:
        """End tokens that may not come yet, or that would not end the output."""
        params = self.params
        return self.end_token_ids if self.num_output_tokens < params.min_tokens else ()

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn by rank, for `top_k` or `top_p`."""
        return self.choice.top_p < 1.0 or self.choice.top_k > 0

    @property
    def takes_most_likely(self) -> bool:
        """Whether the next token is the most likely one by the model's own logits."""
        params = self.params
        is_adjusted = params.logit_bias or self.needs_history or self.is_constrained
        return self.choice.is_greedy and not (is_adjusted or self.banned_token_ids)

    def append(self, token_id: int) -> None:
        """Note a chosen token; called by `Sampling.tokens`."""
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self.needs_history:
            self.output_counts[token_id] += 1
            self.seen_token_ids.add(token_id)

    def uniform(self) -> float:
        """Return the random number in [0, 1) of the next output token."""
        seed = (self.seed % 2**64).to_bytes(8, "little")
        position = self.num_output_tokens.to_bytes(8, "little")
        digest = hashlib.blake2b(seed + position, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampling:
    """Tokens that were chosen on the device and are on their way to the host.

    Attributes:
        token_ids: [num_rows] int64 on the device.
    """

    def __init__(self, token_ids: Tensor, states: Sequence[SamplerState], logits: Tensor) -> None:
        """Start the copies; the logits give the log probabilities of the rows that want them."""
        self.token_ids = token_ids
        self._states = states
        self._host_ids = to_host(token_ids)
        self._wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        self._scores: Scores | None = None
        if self._wanted:
            counts = [states[i].params.logprobs or 0 for i in self._wanted]
            rows = _rows(logits, self._wanted), _rows(token_ids, self._wanted)
            self._scores = score(*rows, counts)
        self._event = torch.cuda.Event() if token_ids.is_cuda else None
        if self._event is not None:
            self._event.record()

    def tokens(self) -> list[TokenLogprob]:
        """Wait for the tokens and note each in its state.

        A log-probability is the model's own, before any sampling parameter.
        """
        if self._event is not None:
            self._event.synchronize()
        tokens = [TokenLogprob(token_id=it, logprob=None) for it in self._host_ids.tolist()]
        if self._scores is not None:
            for i, scored in zip(self._wanted, self._scores.logprobs(), strict=True):
                tokens[i] = scored
        for state, token in zip(self._states, tokens, strict=True):
            state.append(token.token_id)
        return tokens


@torch.inference_mode()
def sample(
    logits: Tensor, states: Sequence[SamplerState], most_likely: Tensor | None = None
) -> Sampling:
    """Choose the next token of each request, without waiting for the device.

    Args:
        logits: [num_rows, vocab_size] float32 on any device; left as they are.
        states: one per row.
        most_likely: [num_rows] int64, the most likely tokens, if they are known already.
    """
    assert logits.shape[0] == len(states), f"{logits.shape[0]} rows, {len(states)} states"
    if most_likely is None or not all(state.takes_most_likely for state in states):
        most_likely = _choose(_adjust(logits, states), states)
    sampling = Sampling(most_likely, states, logits)
    for state in states:
        state.num_output_tokens += 1
    return sampling


def _choose(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Take the most likely token of greedy requests, and draw a token for the others.

    How a row is drawn does not depend on the other rows.
    """
    chosen = logits.argmax(dim=-1)
    drawn_rows = [i for i, state in enumerate(states) if not state.choice.is_greedy]
    filtered = [i for i in drawn_rows if states[i].is_filtered]
    plain = [i for i in drawn_rows if not states[i].is_filtered]
    for rows, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
        # In groups, so that float64 copies of the logits take little of the device's memory.
        group = max(1, _MAX_GROUP_NUMEL // logits.shape[-1])
        for first in range(0, len(rows), group):
            part = rows[first : first + group]
            drawn = draw(_rows(logits, part), [states[i] for i in part])
            chosen[to_device(part, torch.int64, logits.device)] = drawn
    return chosen


class Scores(NamedTuple):
    """Log probabilities on the host: of the token, and of the `num_top` most likely ones."""

    token_ids: Tensor
    own: Tensor
    num_top: Sequence[int]
    top_ids: Tensor
    top_values: Tensor

    def logprobs(self) -> list[TokenLogprob]:
        """Return the scores in the form of the outputs; the copies must have arrived."""
        columns = (self.token_ids, self.own, self.top_ids, self.top_values)
        rows = zip(*(column.tolist() for column in columns), self.num_top, strict=True)
        return [
            TokenLogprob(token_id=i, logprob=own, top=list(zip(ids[:n], values[:n], strict=True)))
            for i, own, ids, values, n in rows
        ]


@torch.inference_mode()
def score(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> Scores:
    """Give the log probabilities of given tokens, one a row, and of the most likely ones.

    Args:
        logits: [num_rows, vocab_size] float32.
        token_ids: [num_rows], the token of each row.
        num_top: how many alternatives of each row.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])[:, 0]
    values, ids = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return Scores(to_host(token_ids), to_host(own), num_top, to_host(ids), to_host(values))


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Take some rows; all of them without a copy."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[to_device(rows, torch.int64, tensor.device)]


def _adjust(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Apply penalties, biases, bans and grammars, each kind to all rows at once.

    Without any, there is no copy.

    Repetition comes first, since it scales the model's own logits.
    """
    scaled = _Cells()
    shifted = _Cells()
    for row, state in enumerate(states):
        params, factor = state.params, state.choice.repetition_penalty
        if factor != 1.0:
            scaled.add(row, dict.fromkeys(state.seen_token_ids, factor))
        shifts = dict(params.logit_bias or {})
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            for token_id, count in state.output_counts.items():
                penalty = params.frequency_penalty * count + params.presence_penalty
                shifts[token_id] = shifts.get(token_id, 0.0) - penalty
        if not state.is_constrained:
            shifts |= dict.fromkeys(state.banned_token_ids, -math.inf)
        shifted.add(row, shifts)
    constrained = [row for row, state in enumerate(states) if state.is_constrained]
    if not (scaled.values or shifted.values or constrained):
        return logits
    adjusted = logits.clone()
    if scaled.values:
        at, factors = scaled.upload(logits)
        seen = adjusted[at]
        adjusted[at] = torch.where(seen > 0, seen / factors, seen * factors)
    if shifted.values:
        at, value = shifted.upload(logits)
        adjusted[at] += value
    if constrained:
        own = [states[row] for row in constrained]
        matchers = [state.matcher for state in own if state.matcher is not None]
        later = [state.banned_token_ids for state in own]
        allowed = allowed_tokens(matchers, later, logits.shape[-1], logits.device)
        if len(constrained) == len(states):
            return adjusted.masked_fill_(~allowed, -math.inf)
        rows = to_device(constrained, torch.int64, logits.device)
        adjusted[rows] = adjusted[rows].masked_fill_(~allowed, -math.inf)
    return adjusted


class _Cells:
    """Single cells of the logits and a number for each; no cell twice."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, cells: Mapping[int, float]) -> None:
        self._rows += [row] * len(cells)
        self._token_ids += cells.keys()
        self.values += cells.values()

    def upload(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows = to_device(self._rows, torch.int64, logits.device)
        token_ids = to_device(self._token_ids, torch.int64, logits.device)
        values = to_device(self.values, torch.float32, logits.device)
        return (rows, token_ids), values


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(values, torch.float64, device)[:, None]


def _probabilities(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Softmax at each row's temperature, in float64, without tokens below `min_p`.

    Logits are taken relative to the largest first, so that a tiny temperature cannot overflow.
    """
    temperature = _column([state.choice.temperature for state in states], logits.device)
    relative = logits.double() - logits.max(dim=-1, keepdim=True).values
    probabilities = (relative / temperature).softmax(dim=-1)
    min_p = _column([state.choice.min_p for state in states], logits.device)
    floor = probabilities.max(dim=-1, keepdim=True).values * min_p
    return probabilities.masked_fill(probabilities < floor, 0.0)


def _draw_plain(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    return _invert(_probabilities(logits, states), states)


def _draw_filtered(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Draw among the `top_k` most likely tokens, of these among those that reach `top_p`."""
    probabilities, order = _probabilities(logits, states).sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = _column(
        [s.choice.top_k if s.choice.top_k > 0 else vocab_size for s in states], logits.device
    )
    rank = torch.arange(vocab_size, device=logits.device)
    probabilities = probabilities.masked_fill(rank >= top_k, 0.0)
    top_p = _column([state.choice.top_p for state in states], logits.device)
    reached = probabilities.cumsum(dim=-1) - probabilities
    limit = top_p * probabilities.sum(dim=-1, keepdim=True)
    # The most likely token stays, and top_p = 1 takes all whatever the sums round to.
    outside = (reached >= limit) & (rank > 0) & (top_p < 1.0)
    drawn = _invert(probabilities.masked_fill(outside, 0.0), states)
    return order.gather(1, drawn[:, None])[:, 0]


def _invert(probabilities: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Draw by inverting the cumulated probabilities, which need not add up to 1.

    Source: inverse transform sampling; one uniform number a token, whatever the vocabulary.
    """
    cumulated = probabilities.cumsum(dim=-1)
    uniform = _column([state.uniform() for state in states], probabilities.device)
    drawn = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)[:, 0]
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(drawn, last)
