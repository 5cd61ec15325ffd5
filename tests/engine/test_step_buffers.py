"""The pinned buffers of a step are not written before the device has read the last step."""

import pytest
import torch
from torch import Tensor

from tieredkv.engine.attention import AttentionKind
from tieredkv.engine.step_buffers import BatchRow, BlockTables, Layout, StepBuffers
from tieredkv.kernels import partition, prefill_dense, small_copies
from tieredkv.kernels.partition import Heads, Latent, Span


class BusyDevice:
    """A stand-in for a device and its event; it copies nothing until it is waited for."""

    def __init__(self) -> None:
        self.issued: list[tuple[Tensor, Tensor]] = []
        self.read: list[list[int]] = []
        self.num_recorded = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.issued.append((source, target))

    def record(self) -> None:
        self.num_recorded = len(self.issued)

    def synchronize(self) -> None:
        for source, target in self.issued[len(self.read) : self.num_recorded]:
            self.read.append(source.tolist())
            target.copy_(source)


@pytest.mark.parametrize("num_tokens", [12, 600])
def test_a_step_reads_the_table_of_its_own_request_though_the_next_one_has_its_slot(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    device, cpu = BusyDevice(), torch.device("cpu")
    kinds = [AttentionKind(Heads(4, 2, 16, torch.float32, cpu), None, 0)]
    tables = BlockTables(2, 2048, 4, cpu)
    large, small = (StepBuffers(kinds, tables, max_tokens=n, vocab_size=9) for n in (640, 16))
    monkeypatch.setattr(small_copies, "copy", device.copy)
    monkeypatch.setattr(tables, "copied", device, raising=False)
    # A request is cancelled while its step waits for the device; another one takes its index.
    cancelled = BatchRow([1] * 600, 0, list(range(150)), request_index=0, table_key=1)
    successor = BatchRow([2] * num_tokens, 600, list(range(500, 800)), request_index=0, table_key=2)
    for row, buffers in ((cancelled, large), (successor, small if num_tokens < 16 else large)):
        layout, changes = Layout([row], kinds, 2), tables.update([row])
        buffers.fill([row], layout, changes, num_tokens=layout.num_tokens, num_kept=1)
    device.record()
    device.synchronize()
    table_of_cancelled, _, table_of_successor, _ = device.read
    assert table_of_cancelled == list(range(150))
    assert table_of_successor == list(range(500, 500 + (600 + num_tokens) // 4))


def test_a_step_that_leaves_the_dense_path_has_all_its_chunks_attended_by_the_paged_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    kinds = [AttentionKind(Heads(4, 2, 16, torch.float32, torch.device("cpu")), None, 0)]
    rows = [BatchRow([1] * n, start, list(range(600))) for n, start in ((2112, 0), (1, 70), (9, 5))]
    assert Layout(rows[:1], kinds, 4).is_fresh
    assert not Layout([BatchRow([1] * 2112, 16, list(range(600)))], kinds, 4).is_fresh
    layout = Layout(rows, kinds, 4)
    assert not layout.is_fresh
    assert layout.shares[0].dense == [Span(0, 0, 2048, 2048)]
    assert layout.num_pairs == (2112**2 + 71**2 - 70**2 + 14**2 - 5**2) / 2
    layout.fit_graph(is_fresh=False)
    assert layout.shares[0] == (
        [],
        [Span(1, 2112, 1, 71)],
        [Span(0, 0, 2112, 2112), Span(2, 2113, 9, 14)],
        [],
    )


def test_a_step_that_is_replayed_has_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    latent = Latent(32, 16, 24, 40)
    heads = Heads(4, 1, 48, torch.float32, torch.device("cpu"), latent)
    kinds, blocks = [AttentionKind(heads, None, 0)], list(range(600))
    fresh = Layout([BatchRow([1] * 4196, 0, blocks)], kinds, 4)
    dense, rest = Span(0, 0, 4096, 4096), Span(0, 4096, 100, 4196)
    assert fresh.is_fresh
    assert fresh.shares[0] == ([dense], [], [], [rest])
    fresh.fit_graph(is_fresh=True)
    assert fresh.shares[0] == ([dense], [], [rest], [])
    behind = Layout([BatchRow([1] * 64, 5000, blocks)], kinds, 4)
    assert behind.shares[0].products == behind.spans
    behind.fit_graph(is_fresh=False)
    assert behind.shares[0] == ([], [], behind.spans, [])


@pytest.mark.parametrize(
    ("num_tokens", "needs_logits", "last"),
    [
        ([1, 1], [True, True], None),  # all tokens are kept: no plan of their own is read
        ([1, 1], [False, True], [Span(1, 0, 1, 1)]),
        ([600], [True], [Span(0, 0, 1, 600)]),
        ([600], [False], []),  # a captured step must not find the plan of the step before
        ([], [], []),
    ],
)
def test_the_kept_tokens_have_a_plan_wherever_a_step_may_read_it(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: list[int],
    needs_logits: list[bool],
    last: list[Span] | None,
) -> None:
    device, cpu = BusyDevice(), torch.device("cpu")
    kinds = [AttentionKind(Heads(4, 2, 16, torch.float32, cpu), None, 0)]
    tables = BlockTables(2, 2048, 4, cpu)
    buffers = StepBuffers(kinds, tables, max_tokens=640, vocab_size=9)
    planned = []
    monkeypatch.setattr(small_copies, "copy", device.copy)
    monkeypatch.setattr(tables, "copied", device, raising=False)
    monkeypatch.setattr(partition, "partition", lambda spans, *_: planned.append(spans))
    rows = [
        BatchRow([1] * n, 0, list(range(150)), needs_logits=needs)
        for n, needs in zip(num_tokens, needs_logits, strict=True)
    ]
    layout = Layout(rows, kinds, 2)
    num_kept = len(layout.kept)
    changes = tables.update(rows)
    buffers.fill(rows, layout, changes, num_tokens=layout.num_tokens, num_kept=num_kept)
    assert planned[2:] == ([] if last is None else [last])


def test_the_table_of_a_fresh_prompt_is_copied_to_where_captured_steps_read_it() -> None:
    tables = BlockTables(3, 2048, 16, torch.device("cpu"))
    row = BatchRow([1] * 1100, 0, list(range(7, 80)), request_index=1, table_key=5)
    assert tables.update([row]) == ([], [])
    tables.copy_fresh(Span(1, 0, 1100, 1100))
    assert tables.tensor[0, tables.fresh_row].tolist() == [*range(7, 76), *[0] * 59]
    assert tables.spare_cell // tables.max_blocks not in (0, 1, 2, tables.fresh_row)
