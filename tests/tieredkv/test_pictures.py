"""Bodies may be longer by the data of pictures, which nobody reads, and by nothing else."""

import asyncio
import json
import tracemalloc
from typing import Any

import httpx
import pytest

from tests.golden import told
from tests.tieredkv.test_app import Engine, answered
from tests.waiting import HANG_S
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, TokenOutput
from tieredkv.server import limits
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys

MOST, MORE = 4096, 65536
DATA = "QUJD/0+9" * 2000
URL = f"data:image/png;base64,{DATA}"
BASE64 = {"type": "base64", "media_type": "image/png", "data": DATA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASK = {"role": "user", "content": "What is this?"}


class Recording(Engine):
    """An engine that keeps the prompts of its requests."""

    info = EngineInfo(
        model="m", max_model_len=16384, vocab_size=1024, block_size=16, worker_pid=None
    )

    def __init__(self) -> None:
        super().__init__(0.0, answered)
        self.prompts = list[list[int]]()

    def submit(self, request: EngineRequest, take: Any) -> None:
        self.prompts.append([*request.prompt_token_ids])
        super().submit(request, take)


def app_of(engine: Engine, tokenization: Tokenization, max_body_size: int = MOST) -> Any:
    settings = Settings(max_body_size=max_body_size)
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    return build_app(Api(settings, engine, tokenization, keys))  # type: ignore[arg-type]


def post(app: Any, path: str, content: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, content=content)

    return asyncio.run(send())


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}, ASK]}


def responses(*items: Any) -> dict[str, Any]:
    return {"input": [*items, ASK]}


def messages(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [*blocks]}, ASK]}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat url": (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "a"}),
    ),
    "chat text": ("/v1/chat/completions", chat({"type": "image_url", "image_url": URL})),
    "chat file": (
        "/v1/chat/completions",
        chat({"type": "file", "file": {"filename": "a.pdf", "file_data": DATA}}),
    ),
    "chat audio": (
        "/v1/chat/completions",
        chat({"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}),
    ),
    "chat tool": (
        "/v1/chat/completions",
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [CALL]},
                {
                    "role": "tool",
                    "tool_call_id": "c",
                    "content": [{"type": "image_url", "image_url": {"url": URL}}],
                },
            ]
        },
    ),
    "responses": (
        "/v1/responses",
        responses(
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": URL, "detail": "high"},
                    {"type": "input_file", "filename": "a", "file_data": URL},
                ],
            }
        ),
    ),
    "responses tool": (
        "/v1/responses",
        responses(
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": URL}],
            },
        ),
    ),
    "responses screen": (
        "/v1/responses",
        responses(
            {
                "type": "computer_call_output",
                "call_id": "c",
                "output": {"type": "computer_screenshot", "image_url": URL},
            }
        ),
    ),
    "responses drawing": (
        "/v1/responses",
        responses({"type": "image_generation_call", "id": "i", "result": DATA}),
    ),
    "messages": (
        "/v1/messages",
        messages({"type": "image", "source": BASE64}, {"type": "document", "source": BASE64}),
    ),
    "messages tool": (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "image", "source": BASE64}],
                        }
                    ],
                },
            ],
        },
    ),
    "messages document": (
        "/v1/messages",
        messages(
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "image", "source": BASE64}]},
            }
        ),
    ),
}


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PICTURES_BYTES", MORE)
    monkeypatch.setattr("tieredkv.server.app.MAX_PICTURES_BYTES", MORE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["plain", "escaped", "lines"])
def test_a_body_may_be_longer_by_its_pictures_and_has_the_same_prompt(
    tokenization: Tokenization, case: str, form: str
) -> None:
    path, body = CASES[case]
    text = json.dumps({"model": "m", **body})
    long = text.replace("/", "\\/") if form == "escaped" else text
    long = long.replace("QUJD", r"QUJD\r\n") if form == "lines" else long
    engine = Recording()
    app = app_of(engine, tokenization)
    assert len(long) > 3 * MOST
    for content in (long, text.replace(DATA, "QUJD")):
        answer = post(app, path, content.encode())
        assert answer.status_code == 200, answer.text
    assert engine.prompts[0] == engine.prompts[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat({"type": "text", "text": URL})),
        (
            "/v1/chat/completions",
            chat({"type": "image_url", "image_url": {"url": f"http://{DATA}"}}),
        ),
        ("/v1/completions", {"prompt": DATA, "messages": []}),
        ("/v1/responses", responses({"role": "user", "content": URL})),
        ("/v1/messages", messages({"type": "document", "source": {"type": "text", "data": DATA}})),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {
                                "type": "tool_use",
                                "id": "t",
                                "name": "f",
                                "input": {"content": [{"type": "image", "source": BASE64}]},
                            }
                        ],
                    },
                    ASK,
                ],
            },
        ),
        (
            "/v1/chat/completions",
            chat(
                {"type": "image_url", "image_url": {"url": URL}},
                {"type": "text", "text": "a" * MOST},
            ),
        ),
    ],
)
def test_texts_have_no_more_room_than_without_pictures(
    tokenization: Tokenization, path: str, body: dict[str, Any]
) -> None:
    content = json.dumps({"model": "m", **body}).encode()
    answer = post(app_of(Recording(), tokenization), path, content)
    assert answer.status_code == 413
    told(answer.json()["error"]["message"])


@pytest.mark.parametrize("is_declared", [True, False])
def test_several_pictures_beyond_both_limits_are_refused_with_both_and_nothing_is_held(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch, is_declared: bool
) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 2 * (MOST + MORE))
    path, body = CASES["chat url"]
    [asked, *others] = body["messages"]
    several = {"model": "m", "messages": [*[asked] * 5, *others]}
    content = json.dumps(several).encode()
    assert len(content) > MOST + MORE
    app = app_of(Recording(), tokenization)

    async def chunks() -> Any:
        for start in range(0, len(content), 10_000):
            yield content[start : start + 10_000]

    for _ in range(3):
        answer = post(app, path, content if is_declared else chunks())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        told(answer.json()["error"]["message"])
    several["messages"] = [*[asked] * 4, *others]
    assert post(app, path, json.dumps(several).encode()).status_code == 200


def test_pictures_are_not_held_while_the_engine_works_on_the_request(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, num = 1 << 20, 8
    monkeypatch.setattr(limits, "MAX_PICTURES_BYTES", 2 * num * size)
    monkeypatch.setattr("tieredkv.server.app.MAX_PICTURES_BYTES", 2 * num * size)
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 2 * num * size)
    waiting = list[tuple[Any, TokenOutput]]()

    class Late(Recording):
        def submit(self, request: EngineRequest, take: Any) -> None:
            super().submit(request, lambda output: waiting.append((take, output)))

    head, tail = json.dumps({"model": "m", **CASES["chat text"][1]}).split(DATA)

    async def ask(app: Any) -> int:
        parts = iter([head.encode(), *[b"x"] * num, tail.encode()])
        status = list[int]()

        async def receive() -> Any:
            if (part := next(parts, None)) is None:
                await asyncio.Event().wait()
            body = part * size if part == b"x" else part
            return {"type": "http.request", "body": body, "more_body": part != tail.encode()}

        async def send(message: Any) -> None:
            status.append(message["status"]) if "status" in message else None

        scope: Any = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        scope |= {"query_string": b"", "root_path": "", "headers": [(b"host", b"localhost")]}
        await app(scope, receive, send)
        return status[0]

    async def run() -> Any:
        app = app_of(Late(), tokenization)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tasks = list[Any]()
            for i in range(3):
                tasks.append(asyncio.create_task(ask(app)))
                while len(waiting) <= i and not tasks[-1].done():
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(HANG_S):  # the thread lets go of its work a bit later
                    while tracemalloc.get_traced_memory()[0] - before >= size:
                        await asyncio.sleep(0.01)
        finally:
            tracemalloc.stop()
        for take, output in waiting:
            take(output)
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [200] * 3
