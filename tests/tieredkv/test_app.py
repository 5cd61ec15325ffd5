"""The application over a stand-in for the engine: late first tokens, errors and limits."""

import asyncio
import json
import re
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.types import ModelInfo
from msgspec.structs import replace

from tests.golden import refused, told
from tieredkv import __version__
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import (
    EngineInfo,
    EngineRequest,
    RequestUsage,
    TokenOutput,
    failed,
)
from tieredkv.errors import RequestError
from tieredkv.operate.calls import Call
from tieredkv.server import app, event_stream
from tieredkv.server.admin import respond
from tieredkv.server.app import SHORT_BYTES, Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.description import ANSWERED, describe
from tieredkv.server.grammar_checker import GrammarChecker
from tieredkv.server.keys import Keys
from tieredkv.server.metrics import MAX_LABEL_SETS, MAX_LABEL_SETS_OF_TENANT, Metrics, Observer
from tieredkv.server.threads import Cancellation

FULL = RequestError("The queue is full", code="queue_full")
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
}


class Engine:
    """Stands in for the engine; answers each request with `say` after `pause_s` seconds."""

    info = EngineInfo(model="m", max_model_len=512, vocab_size=1024, block_size=16, worker_pid=None)
    is_alive, pid, stats = True, 1, dict[str, Any]()
    trouble: str | None = None

    def __init__(self, pause_s: float, say: Callable[[str], TokenOutput]) -> None:
        self._pause_s, self._say = pause_s, say

    def submit(self, request: EngineRequest, take: Callable[[TokenOutput], None]) -> None:
        output = self._say(request.request_id)
        asyncio.get_running_loop().call_later(self._pause_s, take, output)

    def abort(self, request_id: str) -> None:
        """Do nothing; no request holds anything."""

    async def operate(self, call: Call) -> list[dict[str, Any]]:
        return [{"did": call.verb}]


def ask(
    engine: Engine,
    tokenization: Tokenization,
    path: str,
    body: dict[str, Any] | None = None,
    settings: Settings = Settings(),  # noqa: B008
    method: str = "POST",
    num_times: int = 1,
    key: str | None = None,
) -> httpx.Response:
    """Send a body, by default for a stream, `num_times`; return the last answer as a whole."""
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    api = build_app(Api(settings, engine, tokenization, keys))  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = body or {"model": "m", "stream": True, **PATHS.get(path, {})}

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            asked = (
                http.request(method, path, json=body, headers=headers) for _ in range(num_times)
            )
            return [await each for each in asked]

    responses = asyncio.run(send())
    assert len({response.status_code for response in responses}) == 1
    return responses[-1]


def overloaded(request_id: str) -> TokenOutput:
    return failed(request_id, FULL)


def answered(request_id: str) -> TokenOutput:
    usage = RequestUsage(prompt_tokens=2, written_tokens=1)
    return TokenOutput(request_id=request_id, token_ids=[65], finish_reason="length", usage=usage)


def test_the_description_says_where_a_text_may_stand_for_a_list() -> None:
    document = describe()
    schemas = {
        path: each["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, each in document["paths"].items()
    }
    of_parts = document["components"]["schemas"]
    for schema, field in (
        *((schemas["/v1/completions"], name) for name in ("prompt", "stop")),
        (schemas["/v1/responses"], "input"),
        (schemas["/v1/messages"], "system"),
        *((of_parts[name], "content") for name in ("ChatMessage", "InputMessage", "Turn", "Block")),
    ):
        text, *lists = schema["properties"][field]["anyOf"]
        assert text == {"type": "string"} and lists, field
    for path, schema in schemas.items():
        needs_model = path.startswith("/v1") and path != "/v1/responses/input_tokens"
        assert ("model" in schema.get("required", ())) == needs_model, path
    assert of_parts["Tool"]["required"] == ["type", "function"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "a"}, 200),
        ("/detokenize", {"tokens": [65], "model": None}, 200),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}, 400),
        ("/v1/responses/input_tokens", {"input": "a"}, 200),
    ],
)
def test_a_model_is_needed_where_the_description_says_so(
    tokenization: Tokenization, path: str, body: dict[str, Any], status: int
) -> None:
    assert ask(Engine(0.0, overloaded), tokenization, path, body).status_code == status


def test_the_log_says_once_which_field_has_no_effect(
    tokenization: Tokenization, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "m", "prompt": "hi", "user": "somebody", "service_tier": "auto", "store": None}
    with caplog.at_level("INFO", logger="tieredkv.server.app"):
        answer = ask(Engine(0.0, answered), tokenization, "/v1/completions", body, num_times=2)
    assert answer.status_code == 200
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(lines) == 2, "`store` is null"
    for line in lines:
        told(line)


def test_no_two_parts_of_the_description_share_a_name() -> None:
    described = describe()["components"]["schemas"]
    for kind in ANSWERED.values():
        own = kind.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {})
        assert {name: described[name] for name in own} == own, kind


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_at_once_has_its_status(tokenization: Tokenization, path: str) -> None:
    response = ask(Engine(0.0, overloaded), tokenization, path)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [("/v1/messages", 529, "overloaded_error"), ("/v1/completions", 503, "server_error")],
)
def test_a_server_that_stops_is_overloaded_in_the_words_of_its_api(
    tokenization: Tokenization, path: str, status: int, kind: str
) -> None:
    def stopped(request_id: str) -> TokenOutput:
        return TokenOutput(request_id=request_id, token_ids=[], finish_reason="abort")

    response = ask(Engine(0.0, stopped), tokenization, path)
    assert (response.status_code, response.headers["retry-after"]) == (status, "1")
    assert response.json()["error"]["type"] == kind


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_waits_is_pinged_and_then_goes_on_or_fails(
    tokenization: Tokenization, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.02)
    ping = ""  # not a comment, because clients that read lines would parse it as JSON
    if path == "/v1/messages":
        ping = 'event: ping\ndata: {"type":"ping"}'
    good = ask(Engine(0.5, answered), tokenization, path)
    head, *others = good.text.split("\n\n")
    if path == "/v1/responses":
        kinds = [each.partition("\n")[0] for each in [head, *others]]
        ping = "event: response.in_progress"
        assert kinds[:4] == ["event: response.created", *[ping] * 3]
        assert kinds.count("event: response.created") == 1
    else:
        assert (good.status_code, head) == (200, ping)
    events = [each.partition("data: ")[2] for each in others if each not in (ping, "")]
    first, *_ = [json.loads(event) for event in events if event != "[DONE]"]
    if path == "/v1/messages":  # it is sent once its usage is known
        assert first["message"]["usage"]["cache_creation_input_tokens"] == 1
    assert "A" in good.text
    bad = ask(Engine(0.5, overloaded), tokenization, path)
    heads = bad.text.split("\n\n")[:2]
    assert bad.status_code == 200
    assert heads[1].startswith(ping) if path == "/v1/responses" else heads[0] == ping
    last = bad.text.strip().split("\n\n")[-1]
    failure = json.loads(last.partition("data: ")[2])
    told(failure.get("response", failure)["error"]["message"])
    assert (bad.headers["request-id"] in last) == (path == "/v1/messages")


class SlowGrammars(GrammarChecker):
    """Takes half a second for each new grammar, and refuses those with `bad` in them."""

    def _compile(self, grammar: str) -> str:
        time.sleep(0.5)
        return "This grammar is bad" if "bad" in grammar else ""

    def close(self) -> None:
        """Do nothing: there is no process."""


FORMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda regex: {"structured_outputs": {"regex": regex}},
    "/v1/completions": lambda regex: {"structured_outputs": {"regex": regex}},
    "/v1/responses": lambda regex: {"structured_outputs": {"regex": regex}},
    "/v1/messages": lambda regex: {
        "output_format": {"type": "json_schema", "schema": {"enum": [regex]}}
    },
}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_waits_for_its_grammar_is_pinged_and_then_goes_on_or_fails(
    tokenization: Tokenization, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.02)
    monkeypatch.setattr(app, "GrammarChecker", SlowGrammars)
    pinged = ask(Engine(0.5, answered), tokenization, path).text.split("\n\n")[:3]
    body = {"model": "m", "stream": True, **PATHS[path]}
    good = ask(Engine(0.0, answered), tokenization, path, {**body, **FORMED[path]("good")})
    kinds = [each.partition("\n")[0] for each in good.text.split("\n\n")[:3]]
    assert (good.status_code, kinds) == (200, [each.partition("\n")[0] for each in pinged])
    assert "A" in good.text
    bad = ask(Engine(0.0, answered), tokenization, path, {**body, **FORMED[path]("bad")})
    last = bad.text.strip().split("\n\n")[-1]
    assert bad.status_code == 200 and "This grammar is bad" in last
    whole = {**body, "stream": False, **FORMED[path]("bad")}
    refusal = ask(Engine(0.0, answered), tokenization, path, whole)
    assert (refusal.status_code, refusal.headers["x-request-id"][:4]) == (400, "req_")


def test_models_are_told_with_what_anthropics_clients_need_too(tokenization: Tokenization) -> None:
    told = ask(Engine(0.0, answered), tokenization, "/v1/models", method="GET").json()
    [model] = told["data"]
    info = ModelInfo.model_validate(model)
    assert (info.id, info.display_name, told["has_more"]) == ("m", "m", False)
    assert info.created_at.timestamp() == model["created"]
    assert (model["object"], model["max_model_len"]) == ("model", 512)
    assert model["tool_parser"] is None, "its chat template is of no known family"


def test_a_client_learns_what_it_needs_to_make_prompts_by_itself(
    tokenization: Tokenization,
) -> None:
    told = ask(Engine(0.0, answered), tokenization, "/tokenizer_info", method="GET").json()
    assert (told["bos_token"], told["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert told["chat_template"] == tokenization.tokenizer.chat_template


def test_the_tokens_of_a_conversation_go_with_the_templates_arguments(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization.tokenizer, "chat_template", "{{ mood }}")
    body = {"messages": MESSAGES, "chat_template_kwargs": {"mood": "AB"}}
    assert ask(Engine(0.0, answered), tokenization, "/tokenize", body).json()["tokens"] == [65, 66]


def test_an_agent_sees_that_a_server_is_there_without_a_key(tokenization: Tokenization) -> None:
    settings = Settings(api_keys=("k",))
    for method, text in (("HEAD", ""), ("GET", f'{{"version":"{__version__}"}}')):
        told = ask(Engine(0.0, answered), tokenization, "/", None, settings, method)
        assert (told.status_code, told.text) == (200, text)


@pytest.mark.parametrize("is_stream", [True, False])
def test_one_refused_answer_of_several_refuses_all(
    tokenization: Tokenization, is_stream: bool
) -> None:
    """The other answers' tokens arrive together with the refusal, before any is read."""
    says = iter([overloaded, answered, answered])
    engine = Engine(0.0, lambda request_id: next(says)(request_id))
    body = {"model": "m", "prompt": "hi", "n": 3, "stream": is_stream}
    response = ask(engine, tokenization, "/v1/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_a_key_is_told_how_to_give_one(
    tokenization: Tokenization, path: str
) -> None:
    settings = Settings(api_keys=("k",))
    response = ask(Engine(0.0, answered), tokenization, path, settings=settings)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


def test_admin_is_off_where_only_tenants_have_keys_and_has_a_key_of_its_own(
    tokenization: Tokenization, caplog: pytest.LogCaptureFixture
) -> None:
    def status(
        key: str, path: str = "/admin/cache/evict", **settings: str
    ) -> tuple[int, str | None]:
        told = ask(
            Engine(0.0, answered),
            tokenization,
            path,
            {"all": True, "dry_run": True},
            settings=Settings(api_keys=("sk-a",), **settings),  # type: ignore[arg-type]
            method="GET" if path == "/metrics" else "POST",
            key=key,
        )
        is_json = told.headers["content-type"] == "application/json"
        return told.status_code, told.json().get("error", {}).get("code") if is_json else None

    assert status("sk-a") == (403, "admin_off")
    assert status("sk-a", "/metrics") == (200, None)
    assert status("sk-a", admin_key="sk-root")[0] == 401
    assert status("sk-root", admin_key="sk-root") == (200, None)
    assert "sk-root" not in caplog.text


def test_only_tokens_of_the_vocabulary_have_a_text(tokenization: Tokenization) -> None:
    def tell(tokens: list[int]) -> httpx.Response:
        return ask(Engine(0.0, answered), tokenization, "/detokenize", {"tokens": tokens})

    assert tell([72, 105]).json() == {"prompt": "Hi"} and tell([]).json() == {"prompt": ""}
    response = tell([72, 1024])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


def test_metrics_tell_how_good_predictions_were_and_what_was_computed_by_choice() -> None:
    metrics = Metrics(Settings(metric_labels=()), Engine(0.0, answered))  # type: ignore[arg-type]
    usages = [
        RequestUsage(
            prompt_tokens=64,
            recomputed_tokens=num_tokens,
            predicted_s=predicted_s,
            actual_s=1.0,
            forecast_kind=kind,
        )
        for num_tokens, predicted_s, kind in (
            (32, 0.8, "restored"),
            (16, 1.03, "restored"),
            (0, 1.0, "issued"),
            (0, None, None),
        )
    ]
    for number, usage in enumerate(usages):
        output = TokenOutput(request_id=str(number), token_ids=[1], usage=usage)
        Observer(metrics, "", {}, 0.0).on_output(output)
    told = dict(re.findall(r"^(tieredkv_\S+) (\S+)$", metrics.text().decode(), re.M))
    assert told["tieredkv_recomputed_tokens_total"] == "48.0"
    within = 'tieredkv_prediction_error_ratio_bucket{le="%s",waits_for="restored"}'
    counts = [told[within % le] for le in ("0.02", "0.05", "0.15", "0.2")]
    assert counts == ["0.0", "1.0", "1.0", "2.0"]
    assert told['tieredkv_prediction_error_ratio_count{waits_for="restored"}'] == "2.0"
    assert told['tieredkv_prediction_error_ratio_count{waits_for="issued"}'] == "1.0"


@pytest.mark.parametrize(("drain_s", "is_behind"), [(0.0, False), (30.0, False), (41.0, True)])
def test_a_stop_that_would_lose_blocks_is_told_by_health_and_metrics(
    tokenization: Tokenization, drain_s: float, is_behind: bool
) -> None:
    engine, settings = Engine(0.0, answered), Settings(disk_dir="/nvme", drain_timeout=30.0)
    owed = {"bytes": int(drain_s * (1 << 30)), "drain_s": drain_s}
    engine.stats = {"owed": owed, "learnt": {"write_bytes_per_s": 2.0**30}}
    health = ask(engine, tokenization, "/health", settings=settings, method="GET")
    disk = health.json()["disk"]
    assert health.status_code == 200
    if is_behind:
        assert disk["status"] == "behind"
        told(disk["cause"])
    else:
        assert disk == {"status": "ok"}
    text = Metrics(settings, engine).text().decode()  # type: ignore[arg-type]
    samples = dict(re.findall(r"^(tieredkv_\S+) (\S+)$", text, re.M))
    assert float(samples["tieredkv_owed_bytes"]) == owed["bytes"]
    assert float(samples["tieredkv_drain_seconds"]) == drain_s
    assert float(samples["tieredkv_drain_timeout_seconds"]) == 30.0
    engine.stats |= {"disk": {"store_error": "no space left"}}
    disk = ask(engine, tokenization, "/health", settings=settings, method="GET").json()["disk"]
    assert disk["status"] == "failing", "the cause of it all is told first"


@pytest.mark.parametrize("state", ["ok", "off", "failing", "behind"])
def test_health_and_metrics_tell_the_same_state_of_the_disk(
    tokenization: Tokenization, state: str
) -> None:
    engine, settings = Engine(0.0, answered), Settings(disk_dir="/nvme", drain_timeout=30.0)
    engine.stats = {
        "owed": {"bytes": 1 << 30, "drain_s": 60.0 if state == "behind" else 0.0},
        "learnt": {"write_bytes_per_s": 2.0**30},
        "disk": {"store_error": "no space left" if state == "failing" else ""},
    }
    if state == "off":
        engine.info = replace(engine.info, disk_trouble="moved")
    disk = ask(engine, tokenization, "/health", settings=settings, method="GET").json()["disk"]
    text = Metrics(settings, engine).text().decode()  # type: ignore[arg-type]
    samples = dict(re.findall(r'^tieredkv_disk_state{state="(\w+)"} (\S+)$', text, re.M))
    assert disk["status"] == state
    assert ("cause" in disk) is (state != "ok")
    wanted = dict.fromkeys(("ok", "off", "failing", "behind"), "0.0") | {state: "1.0"}
    assert samples == wanted


def test_metrics_count_lost_blocks_by_reason_and_tokens_computed() -> None:
    engine = Engine(0.0, answered)
    counters = {"lost_blocks": {"too_slow": 3, "full": 2}, "computed_tokens": 512}
    engine.stats = {"counters": counters, "disk": {"bytes_written": 1 << 20}}
    text = Metrics(Settings(), engine).text().decode()  # type: ignore[arg-type]
    samples = dict(re.findall(r"^(tieredkv_\S+) (\S+)$", text, re.M))
    assert samples['tieredkv_lost_blocks_total{reason="too_slow"}'] == "3.0"
    assert samples['tieredkv_lost_blocks_total{reason="full"}'] == "2.0"
    assert samples["tieredkv_computed_tokens_total"] == "512.0"
    assert float(samples["tieredkv_disk_written_bytes_total"]) == 1 << 20


def test_one_tenant_cannot_use_up_the_labels_of_metrics() -> None:
    metrics = Metrics(Settings(), Engine(0.0, answered))  # type: ignore[arg-type]
    for i in range(MAX_LABEL_SETS_OF_TENANT):
        assert metrics.labels_of("flood", {"route": f"r{i}"}) == (f"r{i}", "")
    assert metrics.labels_of("flood", {"route": "more"}) == ("other", "other")
    assert metrics.labels_of("quiet", {"route": "mine"}) == ("mine", "")
    assert metrics.labels_of("flood", {"route": "mine"}) == ("mine", "")
    for i in range(2 * MAX_LABEL_SETS):
        metrics.labels_of(f"tenant {i}", {"route": f"t{i}"})
    assert metrics.labels_of("late", {"route": "late"}) == ("other", "other")


@pytest.mark.parametrize("verb", ["prune", "verify"])
def test_a_verb_for_the_disk_says_that_there_is_none(verb: str) -> None:
    engine: Any = Engine(0.0, answered)
    with refused(RequestError, code="no_disk_tier", status=409) as caught:
        asyncio.run(respond(verb, {}, Settings(), engine, lambda _: {}))
    assert (caught.value.status, caught.value.code) == (409, "no_disk_tier")
    answer = asyncio.run(respond("df", {}, Settings(), engine, lambda _: {}))
    assert answer.body == b'{"did":"df"}'
    with refused(RequestError, code="store") as caught:
        asyncio.run(respond("evict", {"al": True}, Settings(), engine, lambda _: {}))
    assert caught.value.status == 400


def test_a_body_longer_than_the_setting_is_refused_and_the_setting_is_named(
    tokenization: Tokenization,
) -> None:
    long = {"model": "m", "prompt": "a", "user": "u" * 2_000_000}
    for settings in (Settings(), Settings(max_body_size=5000)):
        answer = ask(Engine(0.0, answered), tokenization, "/v1/completions", long, settings)
        assert answer.status_code == 413
        told(answer.json()["error"]["message"])
    settings = Settings(max_body_size=4_000_000)
    answer = ask(Engine(0.0, answered), tokenization, "/v1/completions", long, settings)
    assert answer.status_code == 200


def test_work_for_a_client_that_left_is_stopped(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, stopped = asyncio.Event(), threading.Event()
    engine = Engine(0.0, answered)
    keys = Keys(settings=Settings(), is_strict=False, is_local=True)
    api = Api(Settings(), engine, tokenization, keys)  # type: ignore[arg-type]
    body = json.dumps({"model": "m", "prompt": "a" * 10_000}).encode()
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions"}
    messages = [{"type": "http.request", "body": body}]
    loop = asyncio.new_event_loop()

    def stuck(_kind: object, _scope: object, _body: bytes, cancellation: Cancellation) -> None:
        loop.call_soon_threadsafe(began.set)
        assert cancellation.wait(60)
        stopped.set()
        cancellation.check()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await began.wait()
        return {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setattr(api, "_read", stuck)
    scope |= {"query_string": b"", "scheme": "http", "server": ("x", 1)}
    scope["headers"] = [(b"host", b"localhost")]
    loop.run_until_complete(build_app(api)(scope, receive, send))
    loop.close()
    assert stopped.wait(60)
    assert sent[0]["status"] == 499


def test_other_requests_are_answered_while_a_long_one_is_read(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(settings=Settings(), is_strict=False, is_local=True)
    api = Api(Settings(), Engine(0.0, answered), tokenization, keys)  # type: ignore[arg-type]
    go, read = threading.Event(), api._read

    def slow(kind: Any, scope: Any, body: bytes, cancellation: Cancellation) -> Any:
        if len(body) > SHORT_BYTES:
            assert go.wait(60)
        return read(kind, scope, body, cancellation)

    monkeypatch.setattr(api, "_read", slow)

    async def send() -> list[int]:
        transport = httpx.ASGITransport(build_app(api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            long = {"model": "m", "prompt": "a", "user": "u" * 10_000, "max_tokens": 1}
            asked = asyncio.create_task(http.post("/v1/completions", json=long))
            short = await http.post("/v1/completions", json={**long, "user": "u"})
            health = await http.get("/health")
            go.set()
            return [each.status_code for each in (short, health, await asked)]

    assert asyncio.run(send()) == [200] * 3


def test_a_refusal_does_not_hold_on_to_the_body(tokenization: Tokenization) -> None:
    keys = Keys(settings=Settings(), is_strict=False, is_local=True)
    api = Api(Settings(), Engine(0.0, answered), tokenization, keys)  # type: ignore[arg-type]
    for body in ({"model": "m", "prompt": [1] * 600}, {"model": "m", "prompt": 1}):
        with pytest.raises(RequestError) as caught:
            content = json.dumps(body).encode()
            api._read(
                ANSWERED["/v1/completions"], {"tenant": "", "path": ""}, content, Cancellation()
            )
        assert caught.value.__context__ is None
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "_letting_go"
