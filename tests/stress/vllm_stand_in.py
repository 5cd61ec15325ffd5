"""Stands in for `vllm serve` where there is no GPU: answers at once, and counts what it would hold.

Its memory and its VRAM are sets of prompts, and its disk is one file for each. If it has a tier of
tieredkv, it has a process that looks like its worker, and another one when that dies.
`TIEREDKV_FAULT` makes it wrong: `tokens`, another answer from the disk; `miss`, nothing found
there; `ends`, answers that the last tokens of prompts decide alone; `refusal`, an error instead of
an answer once a worker has died.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

FILE_BYTES = 1 << 20
device, host = set[str](), set[str]()
fault = os.environ.get("TIEREDKV_FAULT", "")


def tier() -> dict[str, Any] | None:
    """Return the disk tier that the command line asks for."""
    if "--kv-transfer-config" not in sys.argv:
        return None
    told = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])
    tiers: list[dict[str, Any]] = told["kv_connector_extra_config"]["secondary_tiers"]
    return tiers[0] if tiers else None


def folder() -> Path | None:
    """Return the folder of the disk tier."""
    told = tier()
    return None if told is None else Path(told.get("root_dir") or told["disk_dir"])


class Worker:
    """A process that is started again whenever it dies, as long as this one lives."""

    def __init__(self) -> None:
        self.num_deaths = 0
        self._process = self._start()
        threading.Thread(target=self._run, daemon=True).start()

    def _start(self) -> "subprocess.Popen[bytes]":
        sleep = "import sys; sys.stdin.read()"  # until this process ends
        words = [sys.executable, "-c", sleep, "tieredkv.storage.worker"]
        return subprocess.Popen(words, stdin=subprocess.PIPE)

    def _run(self) -> None:
        while True:
            self._process.wait()
            self.num_deaths += 1
            self._process = self._start()


workers = list[Worker]()


async def complete(request: Request) -> Response:
    """Answer with tokens that depend on the prompt alone, and note where it was found."""
    body = await request.json()
    prompt, disk = body["prompt"], folder()
    name = f"{hash(tuple(prompt)):x}"
    file = None if disk is None else disk / f"{name}.bin"
    on_disk = name not in device | host and file is not None and file.exists()
    found = name in device | host or (on_disk and fault != "miss")
    if on_disk and file is not None:
        read(file)
    elif file is not None:
        file.write_bytes(bytes(FILE_BYTES))
        os.sync()
    device.add(name)
    host.add(name)
    if fault == "refusal" and any(each.num_deaths for each in workers):
        return JSONResponse({"error": "a worker has died"}, 500)
    first = sum(prompt[-16:] if fault == "ends" else prompt) + (on_disk and fault == "tokens")
    form = "token_id:{}" if body.get("return_tokens_as_token_ids") else "t{}"
    words = [form.format(first + place) for place in range(body["max_tokens"])]
    bests = [{word: -0.1, "t0": -3.0} for word in words]
    usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
    if "--enable-prompt-tokens-details" in sys.argv:
        usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) if found else 0}
    if not body.get("stream"):
        logprobs = {"tokens": words, "top_logprobs": bests}
        return JSONResponse({"choices": [{"text": "", "logprobs": logprobs}], "usage": usage})
    events = [
        {"choices": [{"text": "", "logprobs": {"tokens": [word], "top_logprobs": [best]}}]}
        for word, best in zip(words, bests, strict=True)
    ]
    lines = [f"data: {json.dumps(it)}\n\n" for it in [*events, {"choices": [], "usage": usage}]]
    return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


def read(file: Path) -> None:
    """Read a file past the page cache where the filesystem can."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.read(fd, FILE_BYTES)
    finally:
        os.close(fd)


async def reset(request: Request) -> Response:
    """Empty VRAM, and memory if asked."""
    device.clear()
    if request.query_params["reset_external"] == "true":
        host.clear()
    return JSONResponse({"success": True})


async def models(_: Request) -> Response:
    """Name the model."""
    return JSONResponse({"data": [{"id": "model"}]})


async def health(_: Request) -> Response:
    """Tell that it serves."""
    return Response()


async def metrics(_: Request) -> Response:
    """Tell one figure for each of two labels."""
    name = "vllm:kv_offload_load_bytes"
    cache = 'vllm:cache_config_info{a="1",block_size="16",b="2"} 1.0'
    return PlainTextResponse(
        f'# HELP {name} x\n{name}{{a="1"}} 2.0\n{name}{{a="2"}} 3.0\nother 1\n{cache}\n'
    )


app = Starlette(
    routes=[
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/reset_prefix_cache", reset, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
)

if __name__ == "__main__":
    if (tier() or {}).get("type") == "TieredKVTier":
        workers.append(Worker())
    port = int(sys.argv[sys.argv.index("--port") + 1])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
