"""How the difference between two requests is described, when only their digests are kept."""

from typing import Any

import pytest

from tests.golden import told
from tieredkv.engine.engine_messages import RequestUsage
from tieredkv.server.diagnosis import Change, Diagnosis, Seen, parts_of
from tieredkv.types import Tier

LONG = "A prefix that is worth to be kept. " * 20
TODAY = "Today is 2026-11-20. "


def seen(system: str, description: str | None = None, num_tokens: int = 100) -> Seen:
    function: dict[str, Any] = {"name": "f", "description": description, "parameters": {}}
    tools = [{"type": "function", "function": function}] if description else []
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    parts = parts_of(tools, [*messages, {"role": "user", "content": "hi"}])
    return Seen.of(parts, num_tokens, {})


def detail(old: Seen, new: Seen) -> str | None:
    usage = RequestUsage(prompt_tokens=100, miss_reason="never_seen")
    found: str | None = Diagnosis(new, [old]).miss(usage)["detail"]
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (TODAY + LONG, TODAY.replace("20.", "21.") + LONG),
        ("Request a1b2c3d4: " + LONG, "Request c9d8e7f6: " + LONG),
        (TODAY + LONG, "2026-11-21 " + TODAY + LONG),
        (TODAY + LONG, TODAY + "Request abc. " + LONG),
        (TODAY + "Request abc. " + LONG, TODAY + LONG),
        ("Request abc. " + LONG, "Request xyz now. " + LONG),
    ],
    ids=["date", "id", "date added", "id added", "id removed", "words"],
)
def test_a_value_near_the_top_is_named_where_it_was_changed_added_or_removed(
    old: str, new: str
) -> None:
    for place in ((), ("Look",)):
        told(str(detail(seen(old, *place), seen(new, *place))))


def test_messages_after_a_removed_tool_have_not_changed() -> None:
    told(str(detail(seen(LONG, "Look"), seen(LONG))))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("abc", "bca"),
        ("abc", "acb"),
        ("abc", "bc"),
        ("abc", "ac"),
        ("abc", "xabc"),
        ("ab", "abx"),
        ("abc", "axc"),
        ("", "x"),
    ],
)
def test_tools_that_come_go_or_move_are_told_from_those_that_change(old: str, new: str) -> None:
    def of(names: str) -> Seen:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return Seen.of(parts_of(tools, [{"role": "user", "content": LONG}]), 100, {})

    told(str(detail(of(old), of(new))))


def test_a_request_is_compared_with_one_whose_blocks_it_could_use() -> None:
    usage = RequestUsage(prompt_tokens=100, miss_reason="never_seen")
    old = seen(TODAY + LONG, "Look")
    others = old._replace(settings={"namespace": 1})
    new = seen(TODAY.replace("20", "19") + LONG, "Look")
    told(Diagnosis(new, [others, old]).miss(usage)["detail"])


def test_a_line_near_the_top_is_named_where_no_hit_may_end_before_it() -> None:
    """What Claude Code puts first changes by session, and its breakpoints are far behind it."""
    usage = RequestUsage(prompt_tokens=100, miss_reason="behind_lookback")
    old, new = (seen("Request " + word + LONG) for word in ("a1b2c3d4: ", "c9d8e7f6: "))
    found = Diagnosis(new, [old]).miss(usage)
    assert found["reason"] == "behind_lookback"
    told(found["detail"])
    other = old._replace(settings={"namespace": 1})
    assert Diagnosis(new, [other]).miss(usage)["reason"] == "behind_lookback"
    assert Diagnosis(old, [old]).miss(usage)["detail"] is None


def test_what_the_template_was_given_explains_a_miss_in_front_of_a_change() -> None:
    def miss(new: Seen, *earlier: Seen, miss_token: int = 16) -> tuple[str, str | None]:
        usage = RequestUsage(prompt_tokens=100, miss_reason="never_seen", miss_token=miss_token)
        found = Diagnosis(new, earlier).miss(usage)
        return found["reason"], found["detail"]

    def given(at: Seen, **template: int) -> Seen:
        return at._replace(template=template)

    day, other_day = {"time": 1, "arguments": 1}, {"time": 2, "arguments": 1}
    new = given(seen(LONG, "Look"), **other_day)
    reason, detail = miss(new, given(seen(LONG, "Look"), **day))
    assert reason == "template_changed" and detail is not None
    told(detail)
    reason, detail = miss(new, given(seen(LONG, "Look"), time=2, arguments=9))
    assert reason == "template_changed" and detail is not None
    told(detail)
    # A request of the same day has the same blocks, so that the template is not the reason.
    for both in (0, 1):
        earlier = [given(seen(LONG, "Look"), **each) for each in (day, other_day)]
        assert miss(new, *earlier[both:], *earlier[:both]) == ("never_seen", None)
    # Behind a change of the conversation, the template need not be the reason.
    old = given(seen(LONG + "!", "Look"), **day)
    assert miss(new, old, miss_token=99)[0] == "never_seen"
    assert miss(new, given(seen("You help.", "No"), **day)) == ("never_seen", None)
    other_namespace = given(seen(LONG, "Look"), **day)._replace(settings={"namespace": 1})
    assert miss(new, other_namespace)[0] == "other_namespace"


def test_a_request_with_another_text_is_compared_with_nothing() -> None:
    assert detail(seen(LONG), seen(LONG[: len(LONG) // 2] + "other" * 40)) is None
    assert detail(seen("You help."), seen("You translate.")) is None


def test_a_changed_tool_description_is_not_taken_for_a_number_or_time() -> None:
    def why(old: str, new: str) -> str:
        found = Diagnosis(seen(LONG, new), (), "id", seen(LONG, old)).compare(
            RequestUsage(prompt_tokens=9)
        )
        assert found is not None and found.kind == "tools" and found.detail is not None
        return found.detail.partition(" (")[0]

    changed = why("d1", "d2")
    told(changed)
    assert why("Tells the weather", "Tells the time") == changed
    told(why("As of 19:00", "As of 20:13"))


@pytest.mark.parametrize("cached_tokens", [0, 64])
@pytest.mark.parametrize("text", [LONG, TODAY + LONG])
def test_a_prefix_that_was_computed_sooner_than_loaded_was_in_the_cache(
    cached_tokens: int, text: str
) -> None:
    by_tier = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: cached_tokens}
    usage = RequestUsage(
        prompt_tokens=100, cached_tokens_by_tier=by_tier, miss_reason="computed_sooner"
    )
    diagnosis = Diagnosis(seen(text), [seen(LONG)], "id", seen(LONG))
    assert diagnosis.compare(usage) == Change("hit", 0)
    told = diagnosis.miss(usage)
    assert told == {"reason": "computed_sooner", "at_token": 0, "detail": None}


def test_a_difference_is_placed_behind_the_tokens_that_were_reused() -> None:
    by_tier = {Tier.DEVICE: 64, Tier.HOST: 0, Tier.DISK: 0}
    usage = RequestUsage(prompt_tokens=100, cached_tokens_by_tier=by_tier, miss_reason="never_seen")
    old = seen(LONG, "d1")
    found = Diagnosis(seen(LONG, "d2"), (), "id", old).compare(usage)
    assert found is not None and found.at_token == 64
    found = Diagnosis(seen(LONG, "d2"), (), "id", old._replace(num_tokens=32)).compare(usage)
    assert found is not None and found.at_token == 31
