"""Sends request bodies that are made to be expensive, and measures how much they delay others.

\b
    python -m tests.stress.hostile_bodies --commit "$(git rev-parse HEAD)"

Each body is as long as the server takes, and so many clients of one tenant send it at once, again
and again. Meanwhile another client asks `/health` every 20 ms, and one of another tenant sends a
short prompt and wants one token, again and again. At the end the server is told to stop amid the
worst of the bodies. With `--busy-loops`, so many processes that only compute run beside all that.
The last line is JSON:

    health_ms      the slowest answer of `/health` while each body came, first of all `nothing`,
                   which tells how busy the machine is otherwise
    other_tenant   how long the other tenant's prompts took beside nothing and beside all bodies,
                   and the status of each answer
    drain_s        from SIGTERM to the line in the log that says that draining has begun
    resident_bytes memory of the server's process after each body
    grown_bytes    the same some seconds after the last body, beside that before the first
    bars           250 ms, 1 s and 100 MiB, and whether each is kept

The model is small, but its tokenizer has a vocabulary of 150,000 tokens and its context is long.
"""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests import http
from tests.serving import Server, running
from tieredkv.bench import raw
from tieredkv.http_clients import async_http_client

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}
{{- '\n' + c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{{- '<|im_start|>assistant\n' }}"""
HEALTH_BAR_MS, DRAIN_BAR_S, GROWN_BAR_BYTES = 250.0, 1.0, 100 << 20
HOSTILE, OTHER = ({"x-api-key": key} for key in ("sk-hostile", "sk-other"))
KEYS = [flag for key in (HOSTILE, OTHER) for flag in ("--api-key", *key.values())]


def big_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a large vocabulary of syllables without training it."""
    drawn, letters = random.Random(0), "etaoinshrdlucmfwypvbgkjqxz"
    names = bytes_to_unicode()  # type: ignore[no-untyped-call]
    vocab = {name: i for i, name in enumerate(names.values())}
    merges: list[tuple[str, str]] = []

    def add(one: str, other: str) -> None:
        if one + other not in vocab:
            vocab[one + other] = len(vocab)
            merges.append((one, other))

    for one in "\u0120" + letters + letters.upper():
        for other in letters:
            add(one, other)
    for space in ("\u0120", "a"):
        for width in (1, 2, 4, 8, 16, 32):
            add(space * width, space * width)
    starts = [name for name in vocab if len(name) == 2]
    ends = [name for name in starts if name.islower() and name.isascii()]
    while len(vocab) < size - 5:
        one, other = drawn.choice(starts), drawn.choice(ends)
        if one + other not in vocab and len(one + other) <= 6:
            starts.append(one + other)
        add(one, other)
    made = Tokenizer(models.BPE(vocab, merges))
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=made, eos_token=SPECIAL[0], chat_template=TEMPLATE
    )
    return tokenizer


def save_model(folder: Path, vocab_size: int, max_model_len: int) -> None:
    """Write a checkpoint that is small except for its vocabulary."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocab_size - 5,
    )
    make: Any = AutoModelForCausalLM
    make.from_config(config).save_pretrained(folder)
    big_tokenizer(vocab_size).save_pretrained(folder)


Body = Callable[[int], tuple[str, bytes]]
"""Makes a path and a body of so many bytes."""

CHAT, COMPLETE, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)


def _filled(path: str, head: str, unit: str, tail: str, last: str = "") -> Body:
    def make(size: int) -> tuple[str, bytes]:
        units = (size - len(head.encode()) - len((last + tail).encode()) - 64) // len(unit.encode())
        return path, (head + unit * units + last + tail).encode()

    return make


def _chat(content: str, unit: str, tail: str = "") -> Body:
    head = '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":' + content
    return _filled(CHAT, head, unit, f"{tail}}}]}}")


def _ignored(head: str, unit: str, tail: str, last: str = "1") -> Body:
    start = '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"}],"x":'
    return _filled(CHAT, start + head, unit, tail + "}", last)


def prose(size: int) -> str:
    drawn = random.Random(1)
    letters = "etaoinshrdlu"
    words = ["".join(drawn.choices(letters, k=drawn.randint(1, 9))) for _ in range(4000)]
    return " ".join(drawn.choices(words, k=size // 6))[:size]


def letters(size: int) -> str:
    return prose(size).replace(" ", "")


MARK = '"prompt_cache_breakpoint":{"mode":"explicit"}'
PART = f'{{"type":"text","text":"a",{MARK}}},'
CALL = '{"id":"1","type":"function","function":{"name":"f","arguments":"[[],[]]"}},'
TOOL = '{"type":"function","function":{"name":"f","parameters":{"a":[[],{}]}}},'
BLOCK = '{"type":"tool_use","id":"1","name":"f","input":{}},'
ITEM = '{"type":"function_call","call_id":"1","name":"f","arguments":"{}"},'
LAST = '{"role":"user","content":"a"}'
ANTHROPIC = '{"model":"m","max_tokens":1,'

BODIES: dict[str, Body] = {
    "prose": lambda size: _chat(f'"{prose(size - 400)}"', " ")(size),
    "one letter": _chat('"', "a", '"'),
    "letters without an end": lambda size: _chat(
        f'"{prose(size - 400).replace(" ", "")}', "q", '"'
    )(size),
    "spaces": _chat('"', " ", '"'),
    "ideographs": _chat('"', "漢字", '"'),
    "escapes": _chat('"', "\\u0000", '"'),
    "lone surrogates": _chat('"', "\\ud800", '"'),
    "special tokens": _chat('"', "<|im_end|>", '"'),
    "starts of special tokens": _chat('"', "<|im_", '"'),
    "special tokens in a prompt": _filled(
        COMPLETE, '{"model":"m","max_tokens":1,"prompt":"', "<|im_end|>a", '"}'
    ),
    "different pieces": lambda size: (
        COMPLETE,
        json.dumps(
            {"model": "m", "prompt": "".join(f"<|im_end|>{i}" for i in range(size // 18))}
        ).encode(),
    ),
    "private characters": _chat('"', "\U000f0000\U000f1234", '"'),
    "marks": _filled(
        CHAT,
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[',
        PART,
        "]}]}",
        '{"type":"text","text":"b"}',
    ),
    "marks beside text": lambda size: (
        CHAT,
        (
            '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":['
            + PART * 2000
            + json.dumps({"type": "text", "text": prose(size - 200_000)})
            + "]}]}"
        ).encode(),
    ),
    "arrays": _ignored("[", "[],", "]"),
    "objects": _ignored("[", '{"a":{}},', "]"),
    "deep": lambda size: _ignored("[" * (size // 2 - 100) + "1", " ", "]" * (size // 2 - 100), "")(
        size
    ),
    "numbers": _ignored("[", "1,", "]"),
    "a long number": _ignored("[", "9", "]"),
    "exponents": _ignored("[", "1e308,", "]"),
    "strings": _ignored("[", '"",', "]"),
    "keys": lambda size: _ignored(
        "{" + ",".join(f'"{i}":1' for i in range(size // 12)), " ", "}", ""
    )(size),
    "one key again and again": _ignored("{", '"a":1,', "}", '"a":1'),
    "metadata": _filled(
        CHAT, '{"model":"m","max_tokens":1,"messages":[' + LAST + '],"metadata":{"a":"', "b", '"}}'
    ),
    "messages": _filled(CHAT, '{"model":"m","max_tokens":1,"messages":[', LAST + ",", "]}", LAST),
    "16,000 messages": lambda size: (
        CHAT,
        ('{"model":"m","max_tokens":1,"messages":[' + (LAST + ",") * 15_999 + LAST + "]}").encode(),
    ),
    "tools": _ignored("1", " ", ',"tools":[' + TOOL * 20_000 + TOOL[:-1] + "]", ""),
    "1,000 tools": _ignored("1", " ", ',"tools":[' + TOOL * 1000 + TOOL[:-1] + "]", ""),
    "calls": _filled(
        CHAT,
        '{"model":"m","max_tokens":1,"messages":[{"role":"assistant","tool_calls":[',
        CALL,
        f"]}},{LAST}]}}",
        CALL[:-1],
    ),
    "arguments": _filled(
        CHAT,
        '{"model":"m","messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function",'
        '"function":{"name":"f","arguments":"[',
        "[],",
        f'1]"}}}}]}},{LAST}]}}',
    ),
    "stop strings": _ignored("1", " ", ',"stop":[' + '"ab",' * 100_000 + '"c"]', ""),
    "long stop strings": lambda size: _ignored("1", " ", f',"stop":["{"b" * (size // 2)}"]', "")(
        size
    ),
    "logit bias": _ignored(
        "1", " ", ',"logit_bias":{' + ",".join(f'"{i}":1' for i in range(60_000)) + "}", ""
    ),
    "image": _chat('[{"type":"image_url","image_url":{"url":"data:image/png;base64,', "A", '"}}]'),
    "token ids": _filled(
        COMPLETE, '{"model":"m","max_tokens":1,"prompt":[', "12345,", "]}", "12345"
    ),
    "prompts": _filled(
        COMPLETE, '{"model":"m","max_tokens":1,"prompt":[', '"a b c d e f g h",', "]}", '"a"'
    ),
    "answers to one prompt": lambda _size: (
        COMPLETE,
        json.dumps({"model": "m", "prompt": prose(30_000), "n": 128, "max_tokens": 1}).encode(),
    ),
    "blocks of tool use": _filled(
        MESSAGES,
        ANTHROPIC + '"messages":[{"role":"assistant","content":[',
        BLOCK,
        f"]}},{LAST}]}}",
        BLOCK[:-1],
    ),
    "results in a row": _filled(
        MESSAGES,
        ANTHROPIC + '"cache_control":{"type":"ephemeral"},"messages":[{"role":"user","content":[',
        '{"type":"tool_result","tool_use_id":"1","content":"a b"},',
        "]}]}",
        '{"type":"text","text":"b"}',
    ),
    "count of tokens": lambda size: (
        "/v1/messages/count_tokens",
        json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": prose(size - 200)}]}
        ).encode(),
    ),
    "items": _filled(RESPONSES, '{"model":"m","max_output_tokens":1,"input":[', ITEM, "]}", LAST),
    "tokens and their names": lambda size: (
        "/tokenize",
        json.dumps({"prompt": "é" * (size // 6 - 50), "return_token_strs": True}).encode(),
    ),
    "no json": _filled(CHAT, "", "{[,:", ""),
    "gzip": lambda size: (CHAT, b"\x1f\x8b\x08\x00" + bytes(size - 100)),
}


def body_of(name: str, size: int, model: str) -> tuple[str, bytes]:
    """Return the path and the body of a request to a model."""
    path, body = BODIES[name](size - len(model))
    named = f'"model":"{model}"'.encode()
    return path, body.replace(b'"model":"m"', named, 1).replace(b'"model": "m"', named, 1)


class Asker:
    """Sends the same request all the time; `taken_ms` and `statuses` since they were read last."""

    def __init__(self, server: Server, method: str, path: str, body: bytes = b"") -> None:
        self._root, self._method, self._path, self._body = server.root, method, path, body
        self._taken_ms: list[float] = []
        self.statuses: Counter[str] = Counter()

    async def ask(self) -> None:
        async with async_http_client(self._root, timeout=120, headers=OTHER) as client:
            while True:
                begin, status = time.perf_counter(), "none"
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.request(self._method, self._path, content=self._body)
                    status = str(answer.status_code)
                self._taken_ms.append(1e3 * (time.perf_counter() - begin))
                self.statuses[status] += 1
                await asyncio.sleep(0.02)

    def take(self) -> list[float]:
        taken, self._taken_ms = self._taken_ms, []
        return taken


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many processes busy."""
    words = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(kib) << 10


async def trickle(root: str, size: int) -> int:
    """Send a body in chunks of one byte, as fast as the server reads; return the status or 0."""
    host, port = root.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    names = {"Host": host, "Transfer-Encoding": "chunked"} | HOSTILE
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in names.items())]
    writer.write("\r\n".join([*lines, "\r\n"]).encode())
    with contextlib.suppress(ConnectionError):
        for _ in range(size // 10_000):
            writer.write(b"1\r\n \r\n" * 10_000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        status = int((await reader.readline() or b"0 0").split()[1])
        writer.close()
        return status
    return 0


async def attack(
    server: Server, model: str, names: list[str], size: int, clients: int, seconds: float
) -> dict[str, Any]:
    """Send each body for some seconds, and return what it cost."""
    pid, rows, beside_ms = server.pids["server"], list[dict[str, Any]](), list[float]()
    prompt = {"model": model, "prompt": prose(1000), "max_tokens": 1}
    health = Asker(server, "GET", "/health")
    other = Asker(server, "POST", COMPLETE, json.dumps(prompt).encode())
    asking = [asyncio.create_task(asker.ask()) for asker in (health, other)]
    limits: dict[str, Any] = {"limits": httpx.Limits(max_connections=clients), "timeout": 300}
    async with async_http_client(server.root, headers=HOSTILE, **limits) as client:
        await asyncio.sleep(1.0)
        health.take(), other.take()
        await asyncio.sleep(10 * seconds)
        alone_ms, idle_ms = other.take(), round(max(health.take()), 1)
        click.echo(f"{'nothing':28} {0:>9} B  /health {idle_ms:7.1f} ms")
        rows.append({"body": "nothing", "health_ms": idle_ms})
        for name in names:
            path, body = body_of(name, size, model) if name in BODIES else (CHAT, b"")
            await asyncio.sleep(0.2)  # making the body has held up who asks `/health`, too
            health.take(), other.take()
            end, answers, told = time.perf_counter() + seconds, list[float](), set[str]()

            async def send() -> None:
                while time.perf_counter() < end:  # noqa: B023
                    begin = time.perf_counter()
                    if name == "chunks of one byte":  # noqa: B023
                        told.add(str(await trickle(server.root, size)))  # noqa: B023
                    else:
                        answer = await client.post(path, content=body)  # noqa: B023
                        told.add(f"{answer.status_code} {answer.text[:120]}")  # noqa: B023
                    answers.append(time.perf_counter() - begin)  # noqa: B023

            await asyncio.gather(*(send() for _ in range(clients)))
            of_other_ms = other.take()
            beside_ms += of_other_ms
            rows.append(
                {
                    "body": name,
                    "bytes": len(body),
                    "health_ms": round(max(health.take(), default=1e3 * seconds), 1),
                    "other_tenant_ms": round(max(of_other_ms, default=1e3 * seconds), 1),
                    "answers": len(answers),
                    "slowest_s": round(max(answers), 2),
                    "resident_bytes": resident_bytes(pid),
                    "told": sorted(told)[0],
                }
            )
            row = rows[-1]
            click.echo(
                f"{name:28} {row['bytes']:>9} B  /health {row['health_ms']:7.1f} ms  "
                f"other {row['other_tenant_ms']:7.1f} ms  "
                f"{row['answers']:3} answers, slowest {row['slowest_s']:6.2f} s  "
                f"{row['resident_bytes'] >> 20:5} MiB  {row['told'][:60]}"
            )
    for task in asking:
        task.cancel()
    arms = {"alone": alone_ms, "beside": beside_ms}
    taken = [raw.percentiles_ms(arm, of_arm, (50, 99)) for arm, of_arm in arms.items()]
    longest = {f"{arm}_max_ms": max(of_arm) for arm, of_arm in arms.items()}
    figures = {key: round(it, 1) for each in (*taken, longest) for key, it in each.items()}
    counts = {f"{arm}_answers": len(of_arm) for arm, of_arm in arms.items()}
    return {"other_tenant": figures | counts | {"statuses": other.statuses}, "rows": rows}


async def drained(server: Server, model: str, names: list[str], size: int, clients: int) -> float:
    """Tell the server to stop amid bodies, and return the seconds until it began."""
    async with async_http_client(server.root, timeout=300, headers=HOSTILE) as client:

        async def send(name: str) -> None:
            path, body = body_of(name, size, model)
            with contextlib.suppress(httpx.HTTPError):
                await client.post(path, content=body)

        tasks = [asyncio.create_task(send(name)) for name in names * clients]
        await asyncio.sleep(0.5)
        begin = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        while "stopping: open requests are ended" not in server.log:
            await asyncio.sleep(0.005)
        took = time.perf_counter() - begin
        await asyncio.gather(*tasks)
    return took


@click.command(help=__doc__)
@click.option("--max-model-len", default=32_768)
@click.option("--vocab-size", default=150_000)
@click.option("--clients", default=2, help="That send one body at once.")
@click.option("--seconds", default=3.0, help="For which each body is sent.")
@click.option("--busy-loops", default=0, help="Processes that only compute, beside all else.")
@click.option("--only", multiple=True, help="Send only these bodies.")
@click.option("--skip", multiple=True, help="Leave these bodies out.")
@click.option("--commit")
def main(commit: str | None, only: tuple[str, ...], skip: tuple[str, ...], **told: Any) -> None:
    names = [*only] or [*BODIES, "chunks of one byte"]
    names = [name for name in names if name not in skip]
    size = (1 << 20) + 32 * told["max_model_len"]
    with tempfile.TemporaryDirectory() as folder, busy_loops(told["busy_loops"]):
        model = Path(folder) / "m"
        save_model(model, told["vocab_size"], told["max_model_len"])
        with running(Path(folder), "--device-size", "256MiB", *KEYS, model=str(model)) as server:
            path, body = body_of("prose", 20_000, str(model))
            http.post(server.root + path, content=body, timeout=300, headers=HOSTILE)
            before = resident_bytes(server.pids["server"])
            cost = asyncio.run(
                attack(server, str(model), names, size, told["clients"], told["seconds"])
            )
            rows = cost["rows"]
            time.sleep(3.0)
            grown = resident_bytes(server.pids["server"]) - before
            slow = sorted(rows[1:], key=lambda row: row["slowest_s"])
            worst = [row["body"] for row in slow if row["body"] in BODIES][-3:]
            drain_s = asyncio.run(drained(server, str(model), worst, size, told["clients"]))
            begin = time.perf_counter()
            exit_code = server.process.wait(120)
            ended_s = time.perf_counter() - begin
    health_ms = max(row["health_ms"] for row in rows)
    bars = {
        "health_ms": [HEALTH_BAR_MS, health_ms <= HEALTH_BAR_MS],
        "drain_s": [DRAIN_BAR_S, drain_s <= DRAIN_BAR_S],
        "grown_bytes": [GROWN_BAR_BYTES, grown <= GROWN_BAR_BYTES],
    }
    figures = {"health_ms": health_ms, "drain_s": round(drain_s, 3), "grown_bytes": grown}
    figures["other_tenant"] = cost["other_tenant"]
    ending = {"exit_code": exit_code, "ended_s": round(ended_s, 2)}
    click.echo(json.dumps(figures))
    head = raw.head(commit, "python -m tests.stress.hostile_bodies")
    click.echo(
        json.dumps(
            head
            | {"told": told, "body_bytes": size, **figures, **ending, "bars": bars, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
