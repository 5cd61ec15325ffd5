"""Templates that print the date: they are named at the start, and can be told one date."""

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeClock
from tests.golden import refused, told
from tests.tieredkv.test_app import Engine
from tieredkv.config import Settings, load_settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo, RequestUsage, TokenOutput
from tieredkv.errors import ConfigError
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys
from tieredkv.server.template_clock import TemplateClock
from tieredkv.server.threads import Cancellation
from tieredkv.server.tokenizations import make_tokenization

BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DATE = "{{ strftime_now('%d %b %Y') }}\n" + BODY
ASKED = [{"role": "user", "content": ["hi"]}]
NOON = datetime(2026, 11, 28, 12, 30, 15)
DAY_S = 86_400


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that moves this process to another time zone."""

    def move(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


def tokenization_of(template: str, clock: TemplateClock | None = None) -> Tokenization:
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = template
    return Tokenization(tokenizer, clock=clock or TemplateClock(FakeClock(NOON.timestamp())))


def rendered(tokenization: Tokenization, **arguments: Any) -> str:
    return tokenization.of("", Cancellation()).encode_chat(ASKED, arguments).text


def warnings_of(template: str, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    caplog.clear()
    tokenization_of(template, **options).try_template()
    warnings = [it.getMessage() for it in caplog.records if it.name.endswith("template_clock")]
    assert len(warnings) <= 1
    return "".join(warnings)


def test_all_renderings_of_a_request_have_its_time() -> None:
    clock = FakeClock(NOON.timestamp())
    tokenization = tokenization_of("{{ strftime_now('%H:%M:%S') }}" + BODY, TemplateClock(clock))
    request = tokenization.of("", Cancellation())
    clock.advance(100)
    # A mark is looked for with a second rendering.
    encoded = request.encode_chat(ASKED, {}, [(0, 0)])
    assert encoded.text == "12:30:15user: hi\n"
    assert encoded.ends == [len("12:30:15user: hi")]
    assert rendered(tokenization) == "12:31:55user: hi\n"


@pytest.mark.parametrize(
    "template",
    [
        DATE,
        "{{ strftime_now('%Y-%m') }}" + BODY,
        "{{ strftime_now('%A') }}" + BODY,
        "{% if tools %}" + DATE + "{% else %}" + BODY + "{% endif %}",
        "{% if messages[0].role != 'system' %}" + DATE + "{% else %}" + BODY + "{% endif %}",
    ],
)
def test_a_template_that_prints_the_date_is_named_with_the_way_out(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    told(warnings_of(template, caplog))


def test_the_template_s_own_variable_is_named(caplog: pytest.LogCaptureFixture) -> None:
    default = "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}"
    template = default + "{% endif %}{{ date_string }}{{ update_count }}" + BODY
    told(warnings_of(template, caplog))
    assert rendered(tokenization_of(template), date_string="X") == "Xuser: hi\n"


def test_a_template_that_prints_the_time_of_day_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for form in ("%H", "%M", "%S", "%c", "%d %b %Y %I:%M"):
        told(warnings_of(f"{{{{ strftime_now('{form}') }}}}" + BODY, caplog))


def test_a_template_that_prints_nothing_of_the_time_is_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixed = TemplateClock(fixed=NOON)
    assert warnings_of(BODY, caplog) == ""
    assert warnings_of("{% set now = strftime_now('%d') %}" + BODY, caplog) == ""
    assert warnings_of("{{ nosuch.field.field }}", caplog) == ""
    assert warnings_of(DATE, caplog, clock=fixed) == ""


@pytest.mark.parametrize("form", ["%d", "%H"])
def test_a_template_that_refuses_another_time_is_named_and_serves_on(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = NOON.strftime(form)
    refusing = f"{{% if strftime_now('{form}') != '{now}' %}}"
    refusing += "{{ raise_exception('not today') }}{% endif %}" + BODY
    told(warnings_of(refusing, caplog))
    assert rendered(tokenization_of(refusing)) == "user: hi\n"


@pytest.mark.parametrize(
    ("value", "year"), [("2025-06-30", "30 Jun 2025"), ("start", "28 Nov 2026"), (None, "NOW")]
)
def test_one_date_may_be_told_to_all_requests(
    value: str | None, year: str, tmp_path: Path, zone: Any
) -> None:
    zone("UTC")
    offset = tmp_path / "offset"
    offset.write_text(str(datetime(2026, 11, 28, 23, 59).timestamp() - time.time()))
    settings = Settings(template_date=value, clock_offset_file=str(offset))
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M') }}\n" + BODY
    tokenization = make_tokenization(tokenizer, settings, 512)
    first = rendered(tokenization)
    zone("Pacific/Kiritimati")  # 14 hours ahead
    second = rendered(tokenization)
    if value is None:
        assert first.startswith("28 Nov 2026 23:59") and second.startswith("29 Nov 2026 13:59")
    else:
        assert first == second == f"{year} 00:00\nuser: hi\n"


def test_the_date_is_that_of_the_process_s_time_zone(zone: Any) -> None:
    clock = TemplateClock(FakeClock(datetime(2026, 11, 28, 12).timestamp()))
    days = list[str]()
    for name in ("Etc/GMT+12", "UTC", "Etc/GMT-14"):
        zone(name)
        days.append(rendered(tokenization_of(DATE, clock)).partition("\n")[0])
    assert days == ["28 Nov 2026", "28 Nov 2026", "29 Nov 2026"]


def test_the_date_is_a_day_or_start(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text, date in (
        ("2025-06-30", "2025-06-30"),
        ('"2025-06-30"', "2025-06-30"),
        ('"start"', "start"),
        ('""', None),
    ):
        file.write_text(f"[server]\ntemplate_date = {text}\n")
        assert load_settings(config_path=file, environ={}).settings.template_date == date
    for value in ("today", "20250630", "2025-02-30", "30.06.2025", "2025-06-30T10:00"):
        with refused(ConfigError):
            load_settings(arguments={"template_date": value}, environ={})
        with refused(ConfigError):
            Settings(template_date=value)


class Missing(Engine):
    """An engine that has nothing of any prompt behind its first block."""

    info = EngineInfo(
        model="m", max_model_len=4096, vocab_size=1024, block_size=16, worker_pid=None
    )

    def __init__(self) -> None:
        def answered(request_id: str) -> TokenOutput:
            usage = RequestUsage(
                prompt_tokens=200, written_tokens=1, miss_reason="never_seen", miss_token=16
            )
            return TokenOutput(
                request_id=request_id, token_ids=[65], finish_reason="length", usage=usage
            )

        super().__init__(0.0, answered)


TALK = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b"}]
NEXT = {"role": "user", "content": "c"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [*TALK, NEXT]}),
        ("/v1/responses", {"input": [*TALK, NEXT], "store": False}),
        ("/v1/messages", {"messages": [*TALK, NEXT], "max_tokens": 1}),
    ],
)
def test_a_request_whose_blocks_another_date_has_missed_them_for_the_template(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.clock.OFFSET_CHECK_S", 0.0)
    offset = tmp_path / "offset"
    settings = Settings(clock_offset_file=str(offset))
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = DATE
    tokenization = make_tokenization(tokenizer, settings, 4096)
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    api = build_app(Api(settings, Missing(), tokenization, keys))  # type: ignore[arg-type]

    async def ask(http: httpx.AsyncClient) -> Any:
        answer = await http.post(path, json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["tieredkv"]["miss"]

    async def run() -> None:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            first, again = await ask(http), await ask(http)
            offset.write_text(str(DAY_S))
            other_day, same_day = await ask(http), await ask(http)
        assert [it["reason"] for it in (first, again, same_day)] == ["never_seen"] * 3
        assert (other_day["reason"], other_day["at_token"]) == ("template_changed", 16)
        told(other_day["detail"])

    asyncio.run(run())
