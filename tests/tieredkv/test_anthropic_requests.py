"""The effect of `cache_control`: how much of a prompt is kept, how long, and where hits end."""

from dataclasses import replace
from typing import Any

import pytest

from tests.golden import refused, told
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.retention import RetentionPolicy
from tieredkv.server.anthropic_answers import anthropic_body
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.anthropic_blocks import Block
from tieredkv.server.asked import IMAGE_NOTE, Asked, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.types import Tier

TIERS = frozenset({Tier.DEVICE, Tier.HOST})
POLICIES = [("in_memory", 600.0), ("5m", 300.0), ("1h", 3600.0)]
SETTINGS = Settings(
    policies=tuple(
        RetentionPolicy(name=name, idle_s=idle_s, absolute_s=3600.0, tiers=TIERS)
        for name, idle_s in POLICIES
    )
)
RULES, LENIENT = (Rules(SETTINGS, is_strict=it) for it in (True, False))
TOOL = {"name": "look", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


def ask(
    tokenization: Tokenization, *blocks: dict[str, Any], rules: Rules = RULES, **fields: Any
) -> Asked:
    turns = [{"role": "user", "content": list(blocks)}]
    body = {"model": "m", "max_tokens": 4, "messages": turns, **fields}
    request = read(MessagesRequest, body, rules.refuses).cleaned(rules)
    request.check(rules)
    return request.ask(tokenization, rules)


def block(kind: str, ttl: str | None = None, **fields: Any) -> dict[str, Any]:
    control = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    return {"type": kind, **fields, **control}


def text(words: str, ttl: str | None = None) -> dict[str, Any]:
    return block("text", ttl, text=words)


def head(tokenization: Tokenization, asked: Asked, end: int) -> str:
    """Return the text of the prompt's first `end` tokens."""
    return str(tokenization.tokenizer.decode(asked.prompts[0][:end]))


def test_each_breakpoint_is_a_claim_up_to_its_end(tokenization: Tokenization) -> None:
    tool = {**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    blocks = [text("one"), text("two", "5m"), text("three")]
    asked = ask(tokenization, *blocks, system=[text("Help.", "1h")], tools=[tool])
    claims = asked.plan.claims
    assert [(it.retention, it.pin_s) for it in claims] == [
        ("1h", 3600.0),
        ("1h", 3600.0),
        ("5m", 300.0),
    ]
    tools, system, user = (head(tokenization, asked, it.end_token) for it in claims)
    assert tools.rstrip("}\n").endswith('"type": "object"')
    assert system.endswith("system\nHelp.") and user.endswith("user\none\ntwo")
    assert asked.plan.cacheable_tokens == claims[-1].end_token
    assert asked.plan.read_ends is None, "a hit may end anywhere"


def test_claude_codes_billing_block_is_left_out_unless_it_is_to_be_kept(
    tokenization: Tokenization,
) -> None:
    def system(build: str) -> list[dict[str, Any]]:
        billing = f"x-anthropic-billing-header: cc_version=2.0.{build}; cc_entrypoint=cli;"
        return [text(billing), text("You help.", "5m"), text("Be brief.")]

    plain = ask(tokenization, text("one"), system=system("1")[1:])
    first, second = (ask(tokenization, text("one"), system=system(build)) for build in "12")
    assert first.prompts == second.prompts == plain.prompts
    assert first.plan.claims == plain.plan.claims
    kept = Rules(replace(SETTINGS, drop_billing_header="off"), is_strict=True)
    others = [ask(tokenization, text("one"), rules=kept, system=system(it)) for it in "12"]
    assert others[0].prompts != others[1].prompts != plain.prompts
    alone = ask(tokenization, text("one"), system=system("1")[:1])
    assert alone.prompts == ask(tokenization, text("one")).prompts


def test_tools_that_anthropics_api_knows_are_told_if_the_client_runs_them(
    tokenization: Tokenization,
) -> None:
    bash = {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}}
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    rules = Rules(SETTINGS)
    asked = ask(tokenization, text("one"), rules=rules, tools=[search, editor, TOOL, bash])
    prompt = head(tokenization, asked, len(asked.prompts[0]))
    for part in ('"command"', "str_replace_based_edit_tool", '"name": "look"', '"name": "bash"'):
        assert part in prompt
    assert "web_search" not in prompt
    [claim] = asked.plan.claims
    assert head(tokenization, asked, claim.end_token).count('"type": "function"') == 3
    without = ask(tokenization, text("one"), rules=rules, tools=[editor, TOOL, bash])
    assert asked.prompts == without.prompts
    with refused(RequestError):
        ask(tokenization, text("one"), tools=[TOOL, {**search, "max_uses": None}])
    with refused(RequestError, param="tools[0].type", code="invalid_value"):
        ask(tokenization, text("one"), tools=[{"type": "shell", "name": "a"}])


def test_the_last_block_that_may_be_is_marked_automatically(tokenization: Tokenization) -> None:
    control = {"type": "ephemeral"}
    asked = ask(tokenization, text("one"), text("two"), text(""), cache_control=control)
    [claim] = asked.plan.claims
    assert claim.retention == "5m" and head(tokenization, asked, claim.end_token)[-4:] == "\ntwo"
    asked = ask(tokenization, text("one"), text("two", "5m"), cache_control=control)
    assert [claim.retention for claim in asked.plan.claims] == ["5m"]
    with refused(RequestError):
        ask(tokenization, text("one"), text("two", "1h"), cache_control=control)


def test_without_breakpoints_all_or_nothing_is_kept(tokenization: Tokenization) -> None:
    assert ask(tokenization, text("one")).plan.cacheable_tokens is None
    rules = Rules(replace(SETTINGS, anthropic_implicit="off"), is_strict=True)
    assert ask(tokenization, text("one"), rules=rules).plan.cacheable_tokens == 0


def test_hits_end_near_a_breakpoint_and_runs_of_calls_are_one_block(
    tokenization: Tokenization,
) -> None:
    calls = [block("tool_use", id=str(i), name="look", input={}) for i in range(3)]
    results = [block("tool_result", tool_use_id=str(i), content=f"r{i}") for i in range(3)]
    turns = [
        {"role": "user", "content": [text("zero"), text("one")]},
        {"role": "assistant", "content": [text("two"), *calls]},
        {"role": "user", "content": [*results, text("five", "5m"), text("six")]},
    ]
    for lookback, first in ((1, "five"), (2, "r0"), (4, "two"), (20, "zero")):
        rules = Rules(replace(SETTINGS, cache_lookback=lookback), is_strict=True)
        asked = ask(tokenization, rules=rules, messages=turns)
        ends = asked.plan.read_ends
        assert ends is not None and ends == sorted(ends)
        if lookback == 20:
            assert ends.pop(0) == 0, "nothing is too far back"
        assert head(tokenization, asked, ends[0]).endswith(first)
        assert head(tokenization, asked, ends[-1]).endswith("user\nfive")
        assert len(ends) == {1: 1, 2: 4, 4: 8, 20: 10}[lookback]


def test_a_lifetime_that_the_server_does_not_allow_is_refused(tokenization: Tokenization) -> None:
    policies = tuple(
        replace(policy, absolute_s=1800.0, idle_s=300.0) for policy in SETTINGS.policies
    )
    rules = Rules(Settings(policies=policies), is_strict=False)
    with refused(
        RequestError, param="messages.0.content.0.cache_control.ttl", code="invalid_value"
    ) as caught:
        ask(tokenization, text("one", "1h"), rules=rules)
    assert caught.value.param == "messages.0.content.0.cache_control.ttl"


def test_a_strict_server_takes_fields_that_have_no_effect(tokenization: Tokenization) -> None:
    fields: dict[str, Any] = {"metadata": {"user_id": "u"}, "tools": [{**TOOL, "strict": True}]}
    fields |= {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}
    fields["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    assert ask(tokenization, text("one"), **fields).plan.params.max_tokens == 4
    fields["thinking"] = {"type": "between_tools"}
    assert ask(tokenization, text("one"), **fields).plan.params.max_tokens == 4
    with refused(RequestError, param="messages[0].content[0].wise", code="unknown_parameter"):
        ask(tokenization, {**text("one"), "wise": 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": FORM}, "output_format": FORM},
        {"messages": [{"role": "user", "content": [text("a", "2h")]}]},
        {"messages": [{"role": "user", "content": [{**text("a"), "cache_control": {}}]}]},
        {"messages": [{"role": "user", "content": [{**text("a"), "wise": 1}]}]},
        {"stop_sequences": ["a", 1]},
    ],
)
def test_errors_name_the_field_as_anthropics_api_does(
    tokenization: Tokenization, fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(tokenization, text("a"), **fields)
    body = anthropic_body(caught.value, "req_1")
    assert body["error"]["type"] == "invalid_request_error"
    told(body["error"]["message"])
    assert body["request_id"] == "req_1"


def test_what_a_model_has_thought_is_not_in_the_prompt(tokenization: Tokenization) -> None:
    thoughts = [
        block("thinking", thinking="Hm.", signature="s"),
        block("redacted_thinking", data="x"),
    ]
    call = block("tool_use", id="1", name="look", input={})
    result = {"role": "user", "content": [block("tool_result", tool_use_id="1", content="r")]}
    told = []
    for said in ([*thoughts, text("one", "5m"), call], [text("one", "5m"), call]):
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}, result]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        asked = ask(tokenization, messages=turns, thinking=thinking)
        told.append((asked.prompts, asked.plan.claims))
    assert told[0] == told[1]
    with refused(RequestError):
        ask(tokenization, text("hi"), thoughts[0])
    said = [{**thoughts[0], "cache_control": {"type": "ephemeral"}}, text("one")]
    with refused(
        RequestError, param="messages[0].content[0].cache_control", code="unsupported_parameter"
    ):
        ask(tokenization, messages=[{"role": "assistant", "content": said}, result])
    with refused(RequestError):
        ask(tokenization, text("hi"), thinking={"type": "enabled"}, max_tokens=0)


def test_an_image_is_a_note_in_the_prompt_unless_images_are_refused(
    tokenization: Tokenization,
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    picture = block("image", source=source)
    result = block("tool_result", tool_use_id="1", content=[{"type": "image", "source": source}])
    rules = Rules(SETTINGS)
    prompt = ask(tokenization, picture, result, text("What is it?"), rules=rules).prompts[0]
    assert tokenization.decode(prompt).count(IMAGE_NOTE) == 2
    for refusing in (RULES, Rules(replace(SETTINGS, images="refuse"))):
        for it in (picture, result):
            with refused(
                RequestError, param="messages.0.content.1", code="unsupported_parameter"
            ) as error:
                ask(tokenization, text("one"), it, rules=refusing)
            assert error.value.param == "messages.0.content.1"


def test_a_document_in_plain_text_is_text(tokenization: Tokenization) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    asked = ask(tokenization, block("document", "5m", source=source, title="Book"), text("Why?"))
    assert head(tokenization, asked, asked.plan.claims[0].end_token).endswith("Book\nAll of it.")
    with refused(
        RequestError, param="messages[0].content[0].source", code="missing_required_parameter"
    ):
        ask(tokenization, block("document"))


def test_an_empty_turn_is_refused(tokenization: Tokenization) -> None:
    with refused(RequestError, param="messages[0].content", code="empty_array"):
        ask(tokenization)


def test_two_tools_of_one_name_are_refused_unless_one_of_them_is_left_out(
    tokenization: Tokenization,
) -> None:
    bash = {"type": "bash_20250124", "name": "bash"}
    for tools in ([TOOL, TOOL], [bash, {**TOOL, "name": "bash"}]):
        with refused(RequestError):
            ask(tokenization, text("one"), tools=tools, rules=LENIENT)
    search = {"type": "web_search_20250305", "name": "look"}
    ask(tokenization, text("one"), tools=[search, TOOL], rules=LENIENT)


def test_a_breakpoint_inside_of_a_block_counts_as_one_of_the_whole(
    tokenization: Tokenization,
) -> None:
    parts = [text("one", "5m"), text("two")]
    source = {"type": "content", "content": parts}
    for each in (
        block("tool_result", tool_use_id="1", content=parts),
        block("document", source=source),
        block("tool_result", tool_use_id="1", content=[block("document", source=source)]),
    ):
        with refused(RequestError):
            ask(tokenization, each)
        asked = ask(tokenization, each, text("three"), rules=LENIENT)
        [claim] = asked.plan.claims
        assert claim.retention == "5m"
        assert head(tokenization, asked, claim.end_token).endswith("one\ntwo")
    with refused(RequestError):
        results = [block("tool_result", tool_use_id=id, content=parts) for id in "12345"]
        ask(tokenization, *results, rules=LENIENT)


def test_a_breakpoint_deep_inside_of_a_block_is_found_in_one_walk() -> None:
    part = text("one", "1h")
    for _ in range(40):
        part = block("document", source={"type": "content", "content": [part, text("two")]})
    assert Block.model_validate(part).ttl == "1h"


def test_how_to_sample_is_left_to_the_model_where_a_request_does_not_say(
    tokenization: Tokenization,
) -> None:
    params = ask(tokenization, text("one"), top_k=5).plan.params
    assert (params.temperature, params.top_p, params.top_k) == (None, None, 5)
    assert ask(tokenization, text("one"), temperature=1).plan.params.temperature == 1.0


def test_results_are_counted_as_the_messages_that_they_become(tokenization: Tokenization) -> None:
    results = [block("tool_result", tool_use_id="1", content="a") for _ in range(16_385)]
    with refused(RequestError):
        ask(tokenization, *results)


def test_many_calls_in_one_turn_are_read_in_the_time_that_few_take_each() -> None:
    calls = [block("tool_use", id=str(i), name="f") for i in range(20_000)]
    turns = [{"role": "assistant", "content": calls}, {"role": "user", "content": "a"}]
    request = read(MessagesRequest, {"model": "m", "max_tokens": 4, "messages": turns})
    messages, places = request.layout
    assert [call["id"] for call in messages[0]["tool_calls"]] == [str(i) for i in range(20_000)]
    assert len(places) == 20_001
