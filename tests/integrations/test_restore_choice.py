"""A head is loaded where that promises to be faster than computing it, and nowhere else."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.cache.plan import SHORT_GAIN
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.integrations.restore_choice import Choice, Facts, LoggedChoice, choose, replay
from tieredkv.steps import pairs

MiB = 1 << 20
TOKEN_BYTES = 128 << 10  # Llama-3.1-8B
# Of an H200: 8,192 tokens in 0.2 s, 65,536 in 3.3 s.
TIMES = StepTimes(a=3e-3, b=22e-6, c=0.9e-9, d=0.0, least_s=5e-3)


def facts(begin: int = 0, end: int = 8192, **changes: object) -> Facts:
    """Return what is known of a head of an 8B model on a disk of 2 GB/s, some of it changed."""
    told: dict[str, object] = {
        "restore": "auto",
        "chunk_tokens": 16,
        "begin": begin,
        "end": end,
        "num_tokens": end + 64,
        "load_bytes": (end - begin) * TOKEN_BYTES,
        "read_bytes_per_s": 2e9,
        "read_busy_s": 0.0,
        "copy_bytes_per_s": 20e9,
        "protocol_s": 0.03,
        "times": TIMES,
    }
    return Facts(**(told | changes))  # type: ignore[arg-type]


def in_seconds(it: Facts) -> tuple[float, float]:
    """Return how long computing and loading take, put together by hand."""
    assert it.times is not None and it.read_bytes_per_s is not None
    end = max(it.num_tokens, it.end + 1)

    def compute(first: int) -> float:
        times = it.times
        assert times is not None
        step_s = max(times.least_s, times.a + times.b * (end - first))
        if end - first < 64 and times.least_s:
            step_s = times.least_s
        return step_s + times.c * pairs(first, end)

    moved_s = it.load_bytes / it.read_bytes_per_s + it.load_bytes / it.copy_bytes_per_s
    return compute(it.begin), it.read_busy_s + moved_s + it.protocol_s + compute(it.end)


@pytest.mark.parametrize(
    ("changes", "should_load"),
    [
        ({}, False),  # an 8B model computes 8,192 tokens in half the time
        ({"read_bytes_per_s": 12e9}, True),
        ({"read_bytes_per_s": 12e9, "read_busy_s": 0.2}, False),
        ({"read_bytes_per_s": 12e9, "copy_bytes_per_s": 5e9}, False),
        ({"read_bytes_per_s": 12e9, "protocol_s": 0.1}, False),
        ({"end": 65_536}, False),
        ({"end": 131_072}, True),
        ({"begin": 122_880, "end": 131_072}, True),  # late tokens are dear
        ({"times": TIMES._replace(b=220e-6)}, True),  # a model ten times as large
        ({"load_bytes": 8192 * TOKEN_BYTES // 8}, True),  # of which a token has an eighth
        ({"end": 16, "load_bytes": 1}, False),  # a single chunk saves no step
    ],
    ids=str,
)
def test_what_decides(changes: dict[str, object], should_load: bool) -> None:
    choice = choose(facts(**changes))  # type: ignore[arg-type]
    assert (choice.should_load, choice.reason) == (
        should_load,
        "faster" if should_load else "slower",
    )


@pytest.mark.parametrize("restore", ["auto", "load", "compute"])
@pytest.mark.parametrize("read", [None, 1e3, 2e9, 1e13])
@pytest.mark.parametrize("times", [None, TIMES])
def test_what_is_not_known_speaks_for_computing_and_the_setting_for_itself(
    restore: str, read: float | None, times: StepTimes | None
) -> None:
    choice = choose(facts(restore=restore, read_bytes_per_s=read, times=times))
    if restore != "auto":
        assert choice.should_load == (restore == "load")
        assert choice.reason == "setting"
    elif times is None:
        assert (choice.should_load, choice.reason) == (False, "unknown_prefill")
    elif read is None:
        assert (choice.should_load, choice.reason) == (False, "unknown_disk")
    is_known = None not in (read, times)
    assert (choice.compute_s > 0) == (choice.load_s > 0) == (choice.arrival_s > 0) == is_known


numbers = {
    "first": st.integers(0, 5000),
    "num": st.integers(1, 5000),
    "suffix": st.integers(0, 20_000),
    "chunk_tokens": st.sampled_from([1, 16, 256, 1024]),
    "load_bytes": st.integers(1, 1 << 40),
    "read": st.floats(1e3, 1e13),
    "busy_s": st.floats(0, 100),
    "copy": st.floats(1e6, 1e12),
    "protocol_s": st.floats(0, 10),
    "a": st.floats(0, 0.1),
    "b": st.floats(0, 1e-3),
    "c": st.floats(0, 1e-7),
    "least_s": st.floats(0, 0.1),
}


@given(**numbers)
def test_any_numbers_give_the_choice_that_their_seconds_say(
    first: int,
    num: int,
    suffix: int,
    chunk_tokens: int,
    load_bytes: int,
    read: float,
    busy_s: float,
    copy: float,
    protocol_s: float,
    a: float,
    b: float,
    c: float,
    least_s: float,
) -> None:
    it = facts(
        first * chunk_tokens,
        (first + num) * chunk_tokens,
        chunk_tokens=chunk_tokens,
        num_tokens=(first + num) * chunk_tokens + suffix,
        load_bytes=load_bytes,
        read_bytes_per_s=read,
        read_busy_s=busy_s,
        copy_bytes_per_s=copy,
        protocol_s=protocol_s,
        times=StepTimes(a, b, c, 0.0, least_s),
    )
    choice = choose(it)
    compute_s, load_s = in_seconds(it)
    # Blocks have whole bytes, so that up to one byte of each more is read.
    slack_s = num / read
    assert choice.compute_s == pytest.approx(compute_s, rel=1e-6, abs=1e-9)
    assert choice.load_s == pytest.approx(load_s, rel=1e-6, abs=1e-9 + slack_s)
    assert choice.should_load == (choice.compute_s - choice.load_s > choice.least_gain_s)
    assert choice.least_gain_s >= 0
    if choice.should_load:
        assert choice.load_s < choice.compute_s
    assert (choice.reason == "faster") == choice.should_load


@given(
    end=st.integers(1, 8192),
    read=st.floats(1e6, 1e12),
    times=st.floats(1.01, 100),
    worse=st.sampled_from(["read_bytes_per_s", "copy_bytes_per_s", "read_busy_s", "protocol_s"]),
)
def test_a_slower_load_is_never_chosen_where_a_faster_one_was_not(
    end: int, read: float, times: float, worse: str
) -> None:
    better = facts(0, 16 * end, read_bytes_per_s=read, read_busy_s=0.01)
    factor = 1 / times if worse.endswith("bytes_per_s") else times
    changed = {worse: getattr(better, worse) * factor}
    if choose(msgspec.structs.replace(better, **changed)).should_load:
        assert choose(better).should_load


@given(
    begin=st.integers(0, 4096),
    num=st.integers(1, 4096),
    read=st.floats(1e8, 1e11),
    further=st.integers(1, 4096),
)
def test_the_same_head_further_back_is_loaded_rather_sooner(
    begin: int, num: int, read: float, further: int
) -> None:
    near = facts(16 * begin, 16 * (begin + num), read_bytes_per_s=read)
    far = facts(16 * (begin + further), 16 * (begin + further + num), read_bytes_per_s=read)
    near_gain, far_gain = (it.compute_s - it.load_s for it in map(choose, (near, far)))
    assert far_gain >= near_gain - 1e-9


def test_loading_has_to_save_a_step_or_a_share_of_the_time_of_the_prompt() -> None:
    times = PromptTimes(TIMES, 1 << 40)
    for length, least_s in ((512, SHORT_GAIN * times(0, 576)), (8192, times(8255, 8256))):
        choices = [
            choose(facts(end=length, read_bytes_per_s=x * 1e8, protocol_s=0.0))
            for x in range(1, 400)
        ]
        assert [it.least_gain_s for it in choices] == pytest.approx([least_s] * len(choices))
        assert {it.should_load for it in choices} == {False, True}


def test_a_logged_choice_can_be_made_again() -> None:
    for read, restore, times in itertools.product((None, 5e9), ("auto", "load"), (None, TIMES)):
        it = facts(read_bytes_per_s=read, restore=restore, times=times)
        text = str(LoggedChoice(request="chat-1", facts=it, choice=choose(it)))
        assert "\n" not in text
        logged, again = replay(text)
        assert logged.choice == again == choose(it)
        assert isinstance(again, Choice)
    with pytest.raises(ValueError, match="JSON"):
        replay("no choice")
