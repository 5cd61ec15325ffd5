"""Random rows over paged recurrent states, and what their definition makes of them.

The pool is NaN wherever no row may read, and every table has invalid entries for other layers'
pages, so that a read by mistake shows.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import DEVICE, choose
from tieredkv.kernels import states
from tieredkv.kernels.state_layout import LayerState, StateRows, StateSpan
from tieredkv.kernels.state_plan import PlanSize, make_rows
from tieredkv.types import StateShape

RelativeError = Callable[[Tensor, Tensor], float]

Run = Callable[["StateCase", str], Tensor]
"""`StateCase.convolve` or `StateCase.update`."""

NUM_LAYERS, LAYER = 3, 1
UNUSED = 5
"""Elements at the end of a page that hold no piece."""

UNREAD = 0x7FC12345
"""The bits of a NaN that no computation makes, so that one written over it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCase:
    """Some rows of one step, and the states that they begin with."""

    shape: StateShape
    x: Tensor
    mixed: Tensor
    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    pool: Tensor
    tables: Tensor
    spans: list[StateSpan]
    beta_scale: float = 1.0
    size: PlanSize | None = None

    @property
    def state(self) -> LayerState:
        first_piece = LAYER * self.shape.layer_pieces
        return LayerState(self.pool, self.tables, self.shape, first_piece)

    @property
    def rows(self) -> StateRows:
        return make_rows(self.spans, self.pool.device, self.size)

    def copy(self, **changes: object) -> "StateCase":
        """Copy the case with a pool of its own."""
        return replace(self, pool=self.pool.clone(), **changes)  # type: ignore[arg-type]

    def convolve(self, backend: str = "auto") -> Tensor:
        with choose(backend):
            return states.short_conv(self.x, self.weight, self.bias, self.state, self.rows)

    def update(self, backend: str = "auto") -> Tensor:
        with choose(backend):
            return states.delta_rule(
                self.mixed, self.a, self.b, self.a_log, self.dt_bias, self.state, self.rows,
                beta_scale=self.beta_scale,
            )  # fmt: skip

    def tokens(self) -> Tensor:
        """Return the tokens of all rows, row by row."""
        each = [torch.arange(it.first_token, it.first_token + it.num_tokens) for it in self.spans]
        return torch.cat(each).to(self.x.device)

    def places(self, row: int) -> tuple[Tensor, Tensor]:
        """Return where the states [H, K, V] and inputs [C, W - 1] lie in the flat pool.

        Args:
            row: of the tables.
        """
        shape, first = self.shape, LAYER * self.shape.layer_pieces
        size, pages = shape.piece_elements, self.tables[row].tolist()
        per_page = self.pool.shape[1] // size
        each = []
        for piece in range(first, first + shape.layer_pieces):
            start = pages[piece // per_page] * self.pool.shape[1] + piece % per_page * size
            each.append(torch.arange(start, start + size))
        whole = torch.cat(each).to(self.pool.device)
        own = whole[: shape.num_heads * size].view(shape.num_heads, shape.key_dim, -1)
        kept = whole[shape.num_heads * size :][: shape.num_channels * (shape.conv_width - 1)]
        return own, kept.view(shape.num_channels, -1)

    def held(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the states and inputs in a row of the tables, on the CPU."""
        own, kept = (self.pool.flatten()[place].cpu() for place in self.places(row))
        return own, kept

    @property
    def written(self) -> list[int]:
        """The rows of the tables that the step writes."""
        spans = [span for span in self.spans if span.num_tokens]
        return [row for span in spans for row in (span.row, *(each for _, each in span.kept))]

    def expected_conv(self) -> tuple[Tensor, Tensor]:
        """Convolve by the definition, in float64; return the outputs and the new pool."""
        x, weight = self.x.double().cpu(), self.weight.double().cpu()
        out, pool = torch.full_like(x, float("nan")), self.pool.clone()
        for span in self.spans:
            if span.num_tokens:
                own = slice(span.first_token, span.first_token + span.num_tokens)
                inputs = torch.cat([self.held(span.row)[1].double(), x[own].T], dim=1)
                bias = None if self.bias is None else self.bias.double().cpu()
                groups = self.shape.num_channels
                out[own] = F.silu(F.conv1d(inputs[None], weight[:, None], bias, groups=groups))[0].T
                for end, row in (*span.kept, (span.num_tokens, span.row)):
                    last = inputs[:, end : end + self.shape.conv_width - 1]
                    pool.view(-1)[self.places(row)[1]] = last.to(pool)
        return out, pool

    def expected_update(self) -> tuple[Tensor, Tensor]:
        """Update by the definition, token by token, in float64; return outputs and new pool."""
        shape, pool = self.shape, self.pool.clone()
        a, b, a_log, dt_bias, mixed = (
            it.double().cpu() for it in (self.a, self.b, self.a_log, self.dt_bias, self.mixed)
        )
        keys = shape.num_key_heads * shape.key_dim
        q, k, v = mixed.tensor_split([keys, 2 * keys], dim=1)
        group = shape.num_heads // shape.num_key_heads
        out = torch.full((len(mixed), shape.num_heads, shape.value_dim), float("nan")).double()
        for span in self.spans:
            if not span.num_tokens:
                continue
            whole, kept = self.held(span.row)[0].double(), dict(span.kept)
            for token in range(span.first_token, span.first_token + span.num_tokens):
                for head in range(shape.num_heads):
                    key = slice(head // group * shape.key_dim, (head // group + 1) * shape.key_dim)
                    value = v[token, head * shape.value_dim : (head + 1) * shape.value_dim]
                    unit_q, unit_k = (
                        it / (it.square().sum() + 1e-6).sqrt()
                        for it in (q[token, key], k[token, key])
                    )
                    decay = -a_log[head].exp() * F.softplus(a[token, head] + dt_bias[head])
                    faded = whole[head] * decay.exp()
                    beta = b[token, head].sigmoid() * self.beta_scale
                    whole[head] = faded + torch.outer(unit_k, (value - unit_k @ faded) * beta)
                    out[token, head] = unit_q @ whole[head] * shape.key_dim**-0.5
                if (row := kept.get(token + 1 - span.first_token)) is not None:
                    pool.view(-1)[self.places(row)[0]] = whole.to(pool)
            pool.view(-1)[self.places(span.row)[0]] = whole.to(pool)
        return out, pool

    def alone(self, index: int) -> "StateCase":
        """Return the case of one of the rows, whose tokens are the only ones."""
        span = self.spans[index]
        own = slice(span.first_token, span.first_token + span.num_tokens)
        tokens = {name: getattr(self, name)[own].clone() for name in ("x", "mixed", "a", "b")}
        return self.copy(spans=[span._replace(first_token=0)], size=None, **tokens)

    def cut(self, index: int, num_tokens: int) -> tuple["StateCase", "StateCase"]:
        """Return the first tokens of a row alone, and the others; both have one pool."""
        whole = self.alone(index)
        (span,) = whole.spans
        first = replace(whole, spans=[StateSpan(span.row, 0, num_tokens)])
        rest = span.num_tokens - num_tokens
        return first, replace(whole, spans=[StateSpan(span.row, num_tokens, rest)])


def make_case(
    rows: Sequence[tuple[int, bool]],
    shape: StateShape,
    *,
    pieces_per_page: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    has_bias: bool = True,
    beta_scale: float = 1.0,
    kept: Mapping[int, Sequence[int]] | None = None,
) -> StateCase:
    """Make rows of (num_tokens, is_start), in mixed order, with tokens of no row between them.

    The state of a row that is a start is zero. Of the rows in `kept` states are kept behind so many
    tokens.

    Heads forget 0.1% to 5% of their states with each token. Rows without tokens are padding.
    """
    first_piece = LAYER * shape.layer_pieces
    num_pages = -(-NUM_LAYERS * shape.layer_pieces // pieces_per_page)
    page_elements = pieces_per_page * shape.piece_elements + UNUSED
    places = {index: [*ends] for index, ends in (kept or {}).items()}
    num_rows = len(rows) + sum(map(len, places.values()))
    ids = torch.randperm(num_rows * num_pages + 3)[: num_rows * num_pages]
    tables, free = ids.view(num_rows, num_pages).int(), itertools.count(len(rows))
    tables[:, : first_piece // pieces_per_page] = -1
    tables[:, -(-(first_piece + shape.layer_pieces) // pieces_per_page) :] = -1
    starts = list(itertools.accumulate((it[0] + 2 for it in rows), initial=1))
    spans = [
        StateSpan(
            row, starts[row], num_tokens, tuple((end, next(free)) for end in places.get(row, ()))
        )
        if num_tokens
        else StateSpan(-7, -9, 0)
        for row, (num_tokens, _) in enumerate(rows)
    ]
    spans = [spans[index] for index in torch.randperm(len(spans)).tolist()]
    num_tokens = starts[-1]
    dt_bias = torch.randn(shape.num_heads)
    rates = -torch.log(torch.linspace(0.95, 0.999, shape.num_heads))
    drawn = {
        "x": torch.randn(num_tokens, shape.num_channels),
        "mixed": torch.randn(num_tokens, shape.num_channels),
        "weight": torch.randn(shape.num_channels, shape.conv_width) * shape.conv_width**-0.5,
        "a": torch.randn(num_tokens, shape.num_heads) * 0.3,
        "b": torch.randn(num_tokens, shape.num_heads),
    }
    given = {name: tensor.to(device, dtype) for name, tensor in drawn.items()}
    case = StateCase(
        shape=shape,
        **given,
        bias=torch.randn(shape.num_channels).to(device, dtype) if has_bias else None,
        a_log=torch.log(rates / F.softplus(dt_bias)).to(device),
        dt_bias=dt_bias.to(device),
        pool=torch.full((len(ids) + 3, page_elements), UNREAD, dtype=torch.int32)
        .view(torch.float32)
        .to(device),
        tables=tables.to(device),
        spans=spans,
        beta_scale=beta_scale,
    )
    used = torch.zeros(num_tokens, dtype=torch.bool)
    used[case.tokens().cpu()] = True
    for name in drawn.keys() - {"weight"}:
        given[name][~used.to(device)] = float("nan")
    for span in spans:
        if span.num_tokens:
            for place in case.places(span.row):
                drawn_state = torch.zeros if rows[span.row][1] else torch.randn
                case.pool.view(-1)[place] = drawn_state(place.shape).to(device)
    return case


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two float tensors are equal bit for bit, NaN included."""
    width = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.view(width), other.view(width))


def error_in_rows(measure: RelativeError, case: StateCase, out: Tensor, expected: Tensor) -> float:
    """Compare what the tokens of all rows got: one output may be a rest of large terms."""
    own = case.tokens()
    return measure(out[own].cpu(), expected[own.to(expected.device)].cpu())


def compare_cut(backend: str, case: StateCase, at: int, run: Run) -> tuple[Tensor, Tensor]:
    """Run the only row whole and cut; return outputs and states of both, one behind another."""
    whole = case.alone(0)
    first, rest = case.cut(0, at)
    (span,) = whole.spans
    outs = run(whole, backend), torch.cat([run(first, backend)[:at], run(rest, backend)[at:]])
    held = (
        torch.cat([it.pool.view(-1)[place].flatten() for place in it.places(span.row)])
        for it in (whole, first)
    )
    one, other = (
        torch.cat(pair, 0) for pair in zip((it.flatten() for it in outs), held, strict=True)
    )
    return one, other


def compare_kept(backend: str, case: StateCase, run: Run) -> tuple[Tensor, Tensor]:
    """Run the only row whole, and cut where it keeps states; return what both leave.

    That is for each part what the run has made of the state, and the outputs behind all of them.
    """
    whole, cut, begun = case.alone(0), case.alone(0), 0
    (span,), which = whole.spans, 1 if run is StateCase.convolve else 0
    outs, kept, left = run(whole, backend).float(), list[Tensor](), list[Tensor]()
    parts = list[Tensor]()
    for end, row in (*span.kept, (span.num_tokens, span.row)):
        part = replace(cut, spans=[StateSpan(span.row, begun, end - begun)])
        parts.append(run(part, backend)[begun:end].float())
        kept.append(whole.pool.view(-1)[whole.places(row)[which]].flatten())
        left.append(cut.pool.view(-1)[cut.places(span.row)[which]].flatten())
        begun = end
    kept.append(outs.flatten())
    left.append(torch.cat(parts).flatten())
    return torch.cat(kept), torch.cat(left)
