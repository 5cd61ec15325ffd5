"""What operators see of models with windows: blocks, the pages beside them, and anchors."""

from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from tests.golden import told
from tests.operate.test_ask import engine_that_says
from tests.operate.test_prune import chain, fill, model
from tests.storage.blocks import told_by_engine
from tests.storage.conftest import Harness
from tests.storage.windows import KINDS, NEEDS, WINDOWED, pages_of
from tieredkv.cli.main import main
from tieredkv.hashing import windows_of
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Inspect, Ls, Prune, Verify
from tieredkv.operate.infos import BlockInfo
from tieredkv.operate.models import note_model
from tieredkv.types import Tier

LENGTH = 8


BLOCKS = chain("a", WINDOWED, LENGTH)
PAGES = pages_of(BLOCKS, size_bytes=50)


def shown(control: StoreControl) -> list[BlockInfo]:
    call = Inspect(id=BLOCKS[-1].block_hash.hex())
    return [block for page in control.pages(call) for block in page]


def anchors(blocks: Collection[BlockInfo]) -> list[int]:
    return [block.position for block in blocks if block.is_anchor is True]


def test_a_layout_names_the_windows_of_the_pages() -> None:
    assert windows_of(WINDOWED.layout) == [20, 40, 40]
    assert WINDOWED.anchor_needs == NEEDS == (3, 3)
    assert model("full").anchor_needs is None
    for unknown in ("block-contiguous/1", "block-contiguous/1 windows [", "block-contiguous/2 [5]"):
        assert windows_of(unknown) == []


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([(3, 1)], [0, 1, 2, 6, 7]),
        ([(0, 0)], [3, 4, 5, 6, 7]),
        ([(5, 2), (7, 0)], [0, 1, 2, 3, 4]),
        ([(position, 0) for position in range(5)], [7]),
    ],
)
def test_an_anchor_has_all_pages_of_the_blocks_that_its_windows_reach(
    tmp_path: Path, missing: list[tuple[int, int]], expected: list[int]
) -> None:
    pages = PAGES
    lost = {pages[len(KINDS) * position + number].block_hash for position, number in missing}
    pages = [page for page in pages if page.block_hash not in lost]
    plain = chain("plain", model("full"), 3)
    fill(tmp_path, *BLOCKS, *pages[:20])
    fill(tmp_path, *pages[20:], *plain)
    for each in (WINDOWED, model("full")):
        note_model(tmp_path, each)
    control = StoreControl(tmp_path)
    chain_shown = shown(control)
    assert [block.position for block in chain_shown] == [*range(LENGTH)]
    assert anchors(chain_shown) == expected
    df = control.answer(Df(verbose=True))
    disk, uses = df["disk"], {use["model"]: use for use in df["namespaces"]}
    assert (disk["blocks"], disk["window_pages"]) == (LENGTH + 3, len(pages))
    assert disk["window_bytes"] == 50 * len(pages)
    names = "blocks", "bytes", "anchors", "anchor_bytes"
    told = [uses["windowed"][name] for name in names]
    assert told == [LENGTH, 100 * LENGTH + 50 * len(pages), len(expected), 50 * len(pages)]
    assert [uses["full"][name] for name in names] == [3, 300, 0, 0]
    [listed] = [it for page in control.pages(Ls(filter="model=windowed")) for it in page]
    assert listed.blocks == LENGTH


def test_pages_in_ram_complete_the_anchors_of_blocks_on_disk(harness: Harness) -> None:
    client = harness.open()
    note_model(harness.folder, WINDOWED)
    in_vram = [(each, [Tier.DEVICE]) for each in [*BLOCKS, *PAGES[9:]]]
    with engine_that_says(client, told_by_engine(*in_vram)):
        assert anchors(shown(StoreControl(harness.folder))) == [5, 6, 7]
    client.close()


def test_chains_of_models_that_are_not_known_tell_of_no_anchors(tmp_path: Path) -> None:
    fill(tmp_path, *BLOCKS, *PAGES)
    assert {block.is_anchor for block in shown(StoreControl(tmp_path))} == {msgspec.UNSET}


def test_pages_go_with_their_blocks(tmp_path: Path) -> None:
    plain = chain("plain", model("full"), 3)
    fill(tmp_path, *BLOCKS[:4], *BLOCKS[5:], *plain)
    fill(tmp_path, *PAGES)
    for each in (WINDOWED, model("full")):
        note_model(tmp_path, each)
    control = StoreControl(tmp_path)
    # Blocks 5 to 7 follow nothing, nor do the pages of blocks 4 to 7.
    pruned = control.answer(Prune())
    assert pruned["by_reason"] == {"orphan": 3}
    assert (pruned["pruned_blocks"], pruned["window_pages"]) == (3, 4 * len(KINDS))
    done = control.answer(EvictFilter(model="windowed"))
    assert (done["evicted_blocks"], done["window_pages"]) == (4, 4 * len(KINDS))
    assert control.answer(Prune(model="windowed"))["by_reason"] == {"other_model": 3}
    assert control.answer(Verify())["bad"] == 0
    assert control.answer(Df())["disk"]["window_pages"] == 0


def test_the_command_line_counts_pages_beside_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, *BLOCKS[:4])
    fill(tmp_path, *PAGES[: 5 * len(KINDS)])
    note_model(tmp_path, WINDOWED)
    for verb in (["verify", "--no-repair"], ["verify"], ["prune", "-y"], ["evict", "--all", "-y"]):
        assert main([*verb, "--disk-dir", str(tmp_path)]) == 0
        told(capsys.readouterr().out)
