"""Where the recurrent states of requests lie in pages, and which tokens of a step go with them.

A layer of the gated delta rule keeps of all tokens before: a state of each value head,
`[key_dim, value_dim]`, and the last `conv_width - 1` inputs of its convolution. Both are float32
and are cut into *pieces* of `key_dim * value_dim` elements, none of which straddles two pages.

- Piece h of a layer is the state of value head h. The pieces behind those of all heads hold the
  inputs of the convolution, flattened from `[num_channels, conv_width - 1]`, the oldest first; the
  rest of the last one is not used.
- Layer l, counted among recurrent layers only, begins at piece `l * layer_pieces` of a request.
- Piece p of a request lies in page `table[p // pieces_per_page]` of its row of the tables, at
  element `p % pieces_per_page * piece_elements` of that page.

The module knows shapes only: no Triton, no requests, no models.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tieredkv.types import StateShape


class StateSpan(NamedTuple):
    """Consecutive tokens of one request, and the row of its pages.

    Attributes:
        row: of the tables; the state there is the one before the tokens, then the one behind them.
        first_token: the first one's index among the tokens of the step.
        num_tokens: 0 for padding, for which nothing is read or written.
        kept: at most `MAX_KEPT_WITHIN` pairs, ascending, of a number of these tokens, neither none
            nor all, and a row of the tables to whose pages the state behind so many is written.
    """

    row: int
    first_token: int
    num_tokens: int
    kept: tuple[tuple[int, int], ...] = ()


class ChunkRows(NamedTuple):
    """The rows of a step that are computed in chunks, as the kernels of fla-core read them.

    For those, each row is a sequence, and so is what lies between two rows. They stand in the
    falling order of their first tokens: what lies between two of them then begins behind its end,
    and has no tokens to be computed.

    Attributes:
        rows: [n, 3] int32, contiguous, on the device; the row of the tables whose state each begins
            with, the one to whose pages its last state is written, and its number of tokens. Rows
            of padding have no tokens and stand behind the others.
        bounds: [2 * n] int32, the first token of each row and that behind its last one; row i is
            sequence 2 * i.
        offsets: [2 * n] int32, for each sequence that is a row the number of its first chunk.
        chunks: [num_chunks, 2] int32, the sequence of each chunk and its number in it.
    """

    rows: Tensor
    bounds: Tensor
    offsets: Tensor
    chunks: Tensor

    @property
    def num_sequences(self) -> int:
        """Rows and what lies between them."""
        return len(self.bounds) - 1


class StateRows(NamedTuple):
    """The tokens of a step that are computed with each state; no request stands in two rows.

    Attributes:
        spans: the rows on the host. Only the reference reads them, so that they may be empty where
            a captured step serves any rows.
        rows: [num_rows, 4 + 2 * (MAX_KEPT_WITHIN + 1)] int32, contiguous, on the device; see
            `state_plan.row_fields`.
        tiles: [num_tiles, 2] int32, as rows; the row and the number of each tile of the convolution
            that the rows consist of, and of others behind the end of a row. None if no row has more
            than one token.
        chunks: the rows that are computed in chunks; None if there are none.
    """

    spans: Sequence[StateSpan]
    rows: Tensor
    tiles: Tensor | None
    chunks: ChunkRows | None


class LayerState(NamedTuple):
    """One recurrent layer's states of all requests.

    Attributes:
        pool: [num_pages, page_elements] float32, contiguous in its last dimension.
        tables: [num_table_rows, pages_of_a_request] int32, contiguous in its last dimension; only
            the entries of this layer's pages are read.
        shape: of the layer.
        first_piece: of the layer, in every request.
    """

    pool: Tensor
    tables: Tensor
    shape: StateShape
    first_piece: int

    @property
    def pieces_per_page(self) -> int:
        """Pieces that lie in one page."""
        return self.pool.shape[1] // self.shape.piece_elements
