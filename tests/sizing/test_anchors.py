"""A replay of a model with windows: requests go on only where the pages of windows are there."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.levels import few
from tests.sizing.traces import Line, line, random_lines, write
from tieredkv.cli.main import main
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.sizing.anchors import Anchors, AnchorSize, anchor_size, most_room
from tieredkv.sizing.disk import SimulatedClock, SimulatedDisk
from tieredkv.sizing.replay import Sizes, described, replay
from tieredkv.sizing.tiers import Capacity, SimulatedTiers
from tieredkv.traces import Trace, read_trace
from tieredkv.types import KVSpec, LayerKV, Tier, ignore_progress

TOKEN = 1024
SIZE = AnchorSize(num_kinds=2, window=65, block_size=16)
"""Of a trace with blocks of 16 tokens: pages of 4 blocks are needed, and those of 6 are kept."""

WIDE = AnchorSize(num_kinds=3, window=1025, block_size=16)


def trace_of(lines: list[Line], tmp_path: Path) -> Trace:
    return read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)


def recorded(at_s: float, prompt: list[int], answer: list[int] | None = None) -> Line:
    """Return a request as a server records it, of blocks of 16 tokens and a few more tokens."""
    num_tokens, answer = 16 * len(prompt) + 5, answer or []
    made: Line = {"timestamp": round(1000 * at_s), "input_length": num_tokens, "block_tokens": 16}
    made |= {"output_length": 16 * len(answer) + 5, "hash_ids": prompt}
    return made | ({"answer_hash_ids": answer} if answer else {})


def found(lines: list[Line], tmp_path: Path, **sizes: Any) -> dict[str, Any]:
    """Replay a few recorded requests; sizes are in blocks."""
    told = {name: count * 16 * TOKEN for name, count in sizes.items()}
    return replay(
        trace_of(lines, tmp_path), Sizes(token_bytes=TOKEN, anchor=SIZE, **told), ignore_progress
    )


def test_what_is_kept_for_an_anchor_follows_from_the_layers() -> None:
    layers = [LayerKV(2, 8), *[LayerKV(2, 8, 100)] * 3, LayerKV(1, 8, 40)]
    spec = KVSpec(layers=layers, dtype="bfloat16", block_size=16)
    size = anchor_size(spec)
    assert size == AnchorSize(num_kinds=4, window=100, block_size=16)
    assert (size.needed_tokens, size.kept_tokens, size.interval_tokens) == (112, 144, 4480)
    assert [size.interval(tokens) for tokens in (16, 512)] == [280, 9]
    assert size.num_bytes(spec.token_bytes) == 4 * 9 * spec.block_bytes
    assert size.most_pages(16) == 36
    assert [size.num_pages(num, 512) for num in (1, 128, 129, 512, 600)] == [1, 1, 2, 4, 4]
    assert anchor_size(KVSpec(layers=layers[:1], dtype="bfloat16", block_size=16)) is None


def test_anchors_of_many_bytes_are_kept_nearer_and_are_not_used_with_their_conversation() -> None:
    for num_kinds, tokens, is_used in (1, 10_240, True), (4, 10_240, False), (12, 12_288, False):
        size = AnchorSize(num_kinds=num_kinds, window=1024, block_size=64)
        assert (size.interval_tokens, size.uses_intervals) == (tokens, is_used)


def test_a_turn_goes_on_behind_the_prompt_or_the_answer_before_it(tmp_path: Path) -> None:
    prompt, answer, turn = [*range(10)], [10, 11], [12, 13]
    first, second = recorded(0, prompt, answer), recorded(1, [*prompt, *answer, *turn])
    told = found([first, second], tmp_path)
    assert told["cached_tokens"] == 12 * 16
    # Three ends, and of blocks 4 to 13 the pages.
    assert (told["anchors"], told["anchor_bytes"]) == (3, 10 * 2 * 16 * TOKEN)
    assert (told["no_anchor_tokens"], told["blocks"]) == (0, 12 + 14)
    assert told["bytes_per_anchor"] == 2 * 96 * TOKEN
    without = first | {"answer_hash_ids": []}
    assert found([without, second], tmp_path)["cached_tokens"] == 10 * 16
    assert "anchors             3, 320 KiB computed for them" in described(told)


def test_only_a_third_request_goes_on_where_two_have_parted(tmp_path: Path) -> None:
    shared = [*range(20)]
    lines = [recorded(n, [*shared, *range(100 * n, 100 * n + 10)]) for n in range(1, 5)]
    told = found(lines, tmp_path)
    assert told["no_anchor_tokens"] == 20 * 16
    assert told["cached_tokens"] == 2 * 20 * 16


def test_pages_before_the_end_let_a_prompt_be_found_again(tmp_path: Path) -> None:
    prompt = [*range(10)]
    assert found([recorded(0, prompt), recorded(1, prompt)], tmp_path)["cached_tokens"] == 160
    # Two blocks more than a request needs are kept: it may leave another one so much earlier.
    for kept, cached in (9, 9), (8, 8), (7, 0):
        lines = [recorded(0, prompt), recorded(1, [*prompt[:kept], 50, 51])]
        assert found(lines, tmp_path)["cached_tokens"] == 16 * cached


def test_a_conversation_that_changes_what_was_said_goes_on_at_an_interval(tmp_path: Path) -> None:
    prompt, end = [*range(100)], 1280 // 16
    for kept, cached in (end, end), (end + 15, end), (end - 1, 0):
        lines = [recorded(0, prompt), recorded(1, [*prompt[:kept], *range(200, 220)])]
        assert found(lines, tmp_path)["cached_tokens"] == 16 * cached
    # It is kept when the conversation has gone on past it, without blocks to spare before it.
    turns = [recorded(n, [*range(100 + 20 * n)]) for n in range(4)]
    changed = recorded(9, [*prompt[: end + 5], *range(200, 220)])
    before, after = (found(some, tmp_path) for some in (turns, [*turns, changed]))
    assert after["cached_tokens"] - before["cached_tokens"] == 16 * end
    assert before["anchor_bytes"] == (4 + 4 * 6) * 2 * 16 * TOKEN


def test_anchors_of_a_recorded_trace_are_those_of_its_server(tmp_path: Path) -> None:
    sizes = Sizes(token_bytes=TOKEN, anchor=AnchorSize(num_kinds=1, window=128, block_size=64))
    recorded_trace = trace_of([recorded(0, [1, 2])], tmp_path)
    published = trace_of([line(0, [1, 2])], tmp_path)
    assert sizes.of_trace(published) is sizes
    anchors = [it.anchor for it in (sizes, sizes.of_trace(recorded_trace)) if it.anchor]
    assert [it.kept_tokens for it in anchors] == [256, 160]


def found_behind(lines: list[Line], last: Line, tmp_path: Path) -> int:
    """Return how many tokens of the last request are found, in VRAM of 250 blocks."""
    before, after = (found(some, tmp_path, device=250) for some in (lines, [*lines, last]))
    return int(after["cached_tokens"] - before["cached_tokens"])


@pytest.mark.parametrize("is_used", [True, False])
def test_an_interval_is_kept_as_long_as_the_blocks_behind_it_if_it_is_used_with_them(
    is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnchorSize, "uses_intervals", is_used)
    prompt = [*range(100)]
    turns = [recorded(3 * n, [*prompt, *range(100, 100 + 4 * n)]) for n in range(6)]
    others = [recorded(3 * n + 1, [*range(1000 * n + 1000, 1000 * n + 1030)]) for n in range(6)]
    changed = recorded(99, [*prompt[:85], *range(200, 220)])
    lines = sorted([*turns, *others], key=lambda it: it["timestamp"])
    assert found_behind(lines, changed, tmp_path) == (80 * 16 if is_used else 0)


@pytest.mark.parametrize("is_superseded", [True, False])
def test_anchors_that_a_conversation_went_on_past_make_room_for_others(
    is_superseded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_superseded:
        monkeypatch.setattr(SimulatedTiers, "supersede", lambda *_: None)
    other = [*range(1000, 1010)]
    turns = [recorded(1 + number, [*range(10 + 2 * number)]) for number in range(9)]
    lines = [recorded(0, other), *turns, recorded(99, other)]
    # 10 and 26 blocks, 12 pages for the end of each; the conversation has made 44 pages.
    cached = [found(some, tmp_path, device=68)["cached_tokens"] for some in (lines[:-1], lines)]
    assert cached[1] - cached[0] == (160 if is_superseded else 0)


def policy() -> RetentionPolicy:
    return RetentionPolicy(name="any", idle_s=1e5, absolute_s=1e5, tiers=frozenset(Tier))


@pytest.mark.parametrize("seed", few(range(6), 2))
@pytest.mark.parametrize("size", [AnchorSize(1, 129, 16), WIDE])
@pytest.mark.parametrize(
    "capacity",
    [
        Capacity(device=100),
        Capacity(device=0, host=100, disk=50),
        Capacity(device=80, host=60, disk=150, reserve=8, most_owed=20),
    ],
)
def test_no_request_goes_on_without_pages_that_are_in_a_tier(
    capacity: Capacity, size: AnchorSize, seed: int, tmp_path: Path
) -> None:
    trace = trace_of(random_lines(seed, sessions=12, requests=150), tmp_path)
    clock, (num_pages, most_pages) = SimulatedClock(), most_room(size, trace)
    tiers = SimulatedTiers(
        capacity,
        RetentionPolicies([policy()]),
        disk := SimulatedDisk(capacity.disk, clock),
        clock,
        num_distinct=trace.num_distinct + num_pages,
        most_blocks=trace.most_blocks + most_pages,
    )
    anchors, num_found = Anchors(size, tiers, trace.block_tokens), 0
    for request in trace.requests:
        served = anchors.serve(request, request.timestamp / 1e3, frozenset(["any"]))
        hit_end = len([source for source in served.sources if source is not None])
        assert None not in served.sources[:hit_end] + served.page_sources
        needed = {page for page, _ in anchors._pages(request.chain, hit_end, size.needed_tokens)}
        assert len(served.page_sources) == len(needed) and bool(needed) == bool(hit_end)
        num_found += hit_end
        assert not tiers._superseded & anchors._num_users.keys()
        tiers.check()
        disk.check()
    assert num_found


@pytest.mark.parametrize("seed", range(3))
def test_conversations_in_unlimited_memory_find_all_but_what_parts(
    seed: int, tmp_path: Path
) -> None:
    generator, chains, lines = random.Random(seed), [[n * 10_000] for n in range(5)], list[Line]()
    for at_s in range(100):
        chain = generator.choice(chains)
        chain += range(chain[-1] + 1, chain[-1] + generator.randrange(2, 9))
        lines.append(line(at_s, [*chain]))
    trace = trace_of(lines, tmp_path)
    plain, windows = (replay(trace, Sizes(anchor=it), ignore_progress) for it in (None, WIDE))
    # A request of which all blocks are there computes its last token.
    assert windows["cached_tokens"] == plain["cached_tokens"]
    assert windows["no_anchor_tokens"] == 0
    assert windows["anchor_bytes"] > 0 == plain["anchor_bytes"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "random:gpt-oss-20b"], 256 * 12 * 2 * 1024),  # 12 layers with windows
        (["--model", "random:llama-3.1-8b"], 0),
        (["--model", "random:gpt-oss-20b", "--bytes-per-token", "24KiB"], 0),
    ],
)
def test_the_model_tells_of_its_windows(
    options: list[str], expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "trace.jsonl", [line(0, [1, 2]), line(1, [1, 2, 3])])
    assert main(["replay", str(path), *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["bytes_per_anchor"] == expected
    assert (told["anchors"] > 0) == (told["anchor_bytes"] > 0) == (expected > 0)
    assert main(["size", str(path), *options, "--vram", "1GiB", "--json"]) == 0
    swept = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert swept["bytes_per_anchor"] == expected
    assert max(row["cached_tokens"] for row in swept["rows"]) == told["cached_tokens"] == 1024
