"""The promises of the README, checked from outside: real processes, kill -9 and raw files."""

import json
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from tests import http
from tests.serving import SMALL, Server, ask_store, running
from tests.waiting import wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.cli.main import main
from tieredkv.operate.verify import Findings
from tieredkv.types import Tier

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
HOUR_S = 3600
SIZES: dict[str, Any] = {"device_size": "4MiB", "host_size": "4MiB", "restore": "load"}
CLEAR = ("--disk-encryption", "off")  # where bytes of blocks are looked for on disk
PRESSED = (*SMALL, "--device-size", "4MiB", "--host-size", "4MiB", *CLEAR)


def prompt(seed: int, num_tokens: int = 1000) -> list[int]:
    """Return printable tokens of the demo model's vocabulary."""
    return random.Random(seed).choices(range(32, 127), k=num_tokens)


def complete(server: Server, text: str | list[int], *, key: str = "any", **more: Any) -> Any:
    """Return the text of an answer and the cached tokens of its prompt by tier."""
    body = {
        "model": "tiny-random",
        "prompt": text,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    response = http.post(
        f"{server.url}/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sum(details["cached_tokens_by_tier"].values())
    return answer["choices"][0]["text"], details["cached_tokens_by_tier"]


def raw(folder: Path) -> bytes:
    """Return all bytes of all files of a store, index included."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def payload_pieces(folder: Path) -> list[bytes]:
    """Return 64 bytes from the middle of every used extent of a store's segments."""
    pieces = []
    for path in sorted((folder / "segments").iterdir()):
        extent_bytes = int(path.stem.partition("-")[2])
        data = path.read_bytes()
        for start in range(0, len(data), extent_bytes):
            middle = start + extent_bytes // 2
            piece = data[middle : middle + 64]
            if any(piece):
                pieces.append(piece)
    return pieces


def count_found(pieces: list[bytes], folder: Path) -> int:
    """Return how many of the pieces are anywhere in the raw files of a store."""
    data = raw(folder)
    return sum(piece in data for piece in pieces)


# --- a restart is not a cold start, and in_memory is in memory ------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return stored KV bytes of `prompt(0)`, taken from a store that may keep them."""
    folder = tmp_path_factory.mktemp("pieces") / "store"
    sizes = SIZES | {"disk_encryption": "off"}
    with LLM("tiny-random", retention="24h", disk_dir=folder, **sizes) as llm:
        llm.generate(prompt(0), GREEDY)
    found = payload_pieces(folder)
    assert len(set(found)) == 1000 // 16
    return found


def press(server: Server, num_prompts: int, num_tokens: int = 1000) -> None:
    """Serve other prompts, so many that `prompt(0)` leaves VRAM and host memory."""
    for seed in range(1, num_prompts + 1):
        complete(server, prompt(seed, num_tokens))


def test_a_prompt_that_fell_to_disk_is_a_disk_hit_after_kill_9(
    tmp_path: Path, pieces: list[bytes]
) -> None:
    with running(tmp_path, base=PRESSED) as server:
        cold, by_tier = complete(server, prompt(0))
        assert sum(by_tier.values()) == 0
        press(server, 6)
        server.kill()
    assert count_found(pieces, tmp_path / "store") == len(pieces)
    with running(tmp_path, base=PRESSED) as server:
        assert complete(server, prompt(0)) == (cold, {"device": 0, "host": 0, "disk": 992})
        assert server.stop() == 0


def test_in_memory_prompts_under_pressure_and_kill_9_leave_no_byte_on_disk(
    tmp_path: Path, pieces: list[bytes]
) -> None:
    with running(tmp_path, "--default-retention", "in_memory", base=PRESSED) as server:
        complete(server, prompt(0))
        press(server, 6)
        _, by_tier = complete(server, prompt(0))
        assert by_tier == {"device": 0, "host": 0, "disk": 0}, "the pressure was too small"
        assert server.df()["disk"]["blocks"] == 0
        server.kill()
    assert count_found(pieces, tmp_path / "store") == 0
    assert payload_pieces(tmp_path / "store") == []
    assert ask_store(tmp_path / "store", "df")["disk"]["blocks"] == 0


@pytest.mark.slow
def test_the_documented_flags_keep_the_promise_at_their_full_size(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = (
        *("--port", port, "--disk-size", "2GiB", "--host-size", "64MiB"),
        *("--device-size", "32MiB", "--default-retention", "24h", "--disk-write", "on_evict"),
        *("--block-size", "16", "--restore", "load"),
    )
    with running(tmp_path, base=flags) as server:
        assert server.root.endswith(f":{port}")
        cold, _ = complete(server, prompt(0, 2000))
        press(server, 28, 2000)
        assert server.df()["host"]["blocks"] > 0
        server.kill()
    with running(tmp_path, base=flags) as server:
        warm, by_tier = complete(server, prompt(0, 2000))
        assert warm == cold
        assert by_tier == {"device": 0, "host": 0, "disk": 1999}


# --- a fault is a miss ----------------------------------------------------------------------------


def flip_everywhere(folder: Path, every: int, seed: int) -> None:
    """Flip a bit in each stretch of `every` bytes of all segment files, or of a toy's files."""
    generator, segments = random.Random(seed), folder / "segments"
    for path in (segments if segments.exists() else folder).iterdir():
        data = bytearray(path.read_bytes())
        for start in range(0, len(data) - every, every):
            data[start + generator.randrange(every)] ^= 1 << generator.randrange(8)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(4 << 10, id="every block", marks=pytest.mark.slow),
        pytest.param(100 << 10, id="every third block"),
    ],
)
def test_flipped_bytes_cost_blocks_and_never_a_token(
    every: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys, verified_keys = (tmp_path / name for name in ("store", "keys", "verified_keys"))
    prompts = [prompt(seed, 600) for seed in range(4)]
    options = {"retention": "24h", "disk_dir": store, "disk_key_dir": keys, **SIZES}
    with LLM("tiny-random", **options) as llm:
        cold = [llm.generate(tokens, GREEDY)[0].token_ids for tokens in prompts]
    flip_everywhere(store, every, seed=1)
    verified = Path(shutil.copytree(store, tmp_path / "verified"))
    shutil.copytree(keys, verified_keys)

    with LLM("tiny-random", **options) as llm:
        again = [llm.generate(tokens, GREEDY)[0] for tokens in prompts]
        stats: Any = llm.tier_stats()
        llm.core.cache.check()
    assert [output.token_ids for output in again] == cold
    from_disk = sum(output.usage.cached_tokens_by_tier[Tier.DISK] for output in again)
    assert from_disk < 4 * 592
    assert (from_disk > 0) == (every > 36 << 10)
    assert sum(stats["disk"]["faults"].values()) > 0

    capfd.readouterr()
    monkeypatch.setenv("TIEREDKV_DISK_KEY_DIR", str(verified_keys))
    answers = []
    for exit_code in (1, 0):
        assert main(["verify", "--disk-dir", str(verified), "--json"]) == exit_code
        answers.append(json.loads(capfd.readouterr().out.splitlines()[-1]))
    first, second = answers
    assert first["checked"] == 4 * 37
    assert first["bad"] == first["repaired"] == sum(first["by_reason"].values()) > 0
    sound = Findings(checked=first["checked"] - first["bad"])
    assert second == msgspec.to_builtins(sound)
    options |= {"disk_dir": verified, "disk_key_dir": verified_keys}
    with LLM("tiny-random", **options) as llm:
        assert [llm.generate(tokens, GREEDY)[0].token_ids for tokens in prompts] == cold


# --- retention ------------------------------------------------------------------------------------


def test_after_24_hours_a_prompt_is_a_miss_and_its_bytes_are_gone(tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    store = tmp_path / "store"
    flags = ("--disk-write", "write_behind", "--sweep-interval", "1s")
    with running(tmp_path, *flags, clock_offset_file=offset) as server:
        assert "TIEREDKV_TEST_CLOCK_OFFSET_FILE" in server.log
        cold, _ = complete(server, prompt(0))
        wait_until(lambda: server.df()["disk"]["blocks"] == 62, "not written behind")
        pieces = payload_pieces(store)
        assert len(pieces) == 62

        offset.write_text(str(24 * HOUR_S - 300))  # five minutes early, as the machine may be slow
        assert complete(server, prompt(0)) == (cold, {"device": 992, "host": 0, "disk": 0})
        offset.write_text(str(24 * HOUR_S + 1))
        text, by_tier = complete(server, prompt(0), prompt_cache_retention="in_memory")
        assert (text, sum(by_tier.values())) == (cold, 0)
        wait_until(lambda: count_found(pieces, store) == 0, "bytes are left")
        assert server.df()["disk"]["blocks"] == 0
        assert server.stop() == 0


def test_a_clock_set_back_lengthens_no_life(tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text(str(10 * HOUR_S))
    store = tmp_path / "store"
    flags = ("--sweep-interval", "1s")
    with running(tmp_path, *flags, clock_offset_file=offset) as server:
        complete(server, prompt(0))
        offset.write_text(str(33 * HOUR_S))  # 23 hours after the start
        _, by_tier = complete(server, prompt(0))
        assert sum(by_tier.values()) == 992
        offset.write_text("0")  # set back by 33 hours, then forward to 2 hours past the former time
        complete(server, prompt(1))
        offset.write_text(str(35 * HOUR_S))
        _, by_tier = complete(server, prompt(0), prompt_cache_retention="in_memory")
        assert sum(by_tier.values()) == 0
        complete(server, prompt(2))
        assert server.stop() == 0
    pieces = payload_pieces(store)
    assert len(pieces) >= 62

    offset.write_text(str(12 * HOUR_S))  # the next process starts with a clock 23 hours behind
    with running(tmp_path, *flags, clock_offset_file=offset) as server:
        _, by_tier = complete(server, prompt(2), prompt_cache_retention="in_memory")
        assert sum(by_tier.values()) == 0
        wait_until(lambda: count_found(pieces, store) == 0, "bytes are left")


# --- tenants, and the operator --------------------------------------------------------------------


def test_api_keys_share_nothing_on_disk_either(tmp_path: Path) -> None:
    keys = ("--api-key", "sk-a", "--api-key", "sk-b")
    with running(tmp_path, *keys) as server:
        cold, _ = complete(server, prompt(0), key="sk-a")
        assert sum(complete(server, prompt(0), key="sk-b")[1].values()) == 0
        complete(server, prompt(1), key="sk-b")
        assert server.stop() == 0
    assert len({chain["namespace"] for chain in ask_store(tmp_path / "store", "ls")["chains"]}) == 2
    with running(tmp_path, *keys) as server:
        assert sum(complete(server, prompt(1), key="sk-a")[1].values()) == 0
        assert complete(server, prompt(1), key="sk-b")[1]["disk"] == 992
        assert complete(server, prompt(0), key="sk-a") == (
            cold,
            {"device": 0, "host": 0, "disk": 992},
        )
        assert server.stop() == 0
    for path in (tmp_path / "store").rglob("*"):
        assert path.is_dir() or b"sk-a" not in path.read_bytes()


def test_the_operator_sees_every_tier_and_evicts_a_chain_from_all_of_them(tmp_path: Path) -> None:
    with running(tmp_path, "--disk-write", "write_behind", base=PRESSED) as server:
        store = server.disk_dir
        for seed in (0, 1, 2):
            complete(server, prompt(seed))
        wait_until(lambda: server.df()["disk"]["blocks"] == 3 * 62, "not written")
        df = server.df()
        for tier in ("device", "host", "disk"):
            assert df[tier]["blocks"] > 0
            assert 0 < df[tier]["bytes_live"] <= df[tier]["bytes_budget"]
        assert df["disk"]["bytes_live"] <= df["disk"]["bytes_files"]
        assert df["writer_pid"] == server.pids["worker"]

        chains = ask_store(store, "ls")["chains"]
        oldest = min(chains, key=lambda chain: chain["last_used_max"])
        assert oldest["blocks"] == 62
        evicted = ask_store(store, "evict", oldest["id"], "-y")
        assert evicted["disk"]["evicted_blocks"] == 62
        assert evicted["evicted_blocks"] > 62, "VRAM and host memory kept theirs"
        assert evicted["freed_bytes"] > 0
        assert sum(complete(server, prompt(2))[1].values()) == 992
        assert sum(complete(server, prompt(0))[1].values()) == 0
        assert ask_store(store, "evict", "--all", "-y")["evicted_blocks"] > 0
        assert sum(complete(server, prompt(2))[1].values()) == 0
        assert server.stop() == 0
    df = ask_store(store, "df")
    assert (df["device"], df["host"], df["writer_pid"]) == (None, None, None)
    assert df["disk"]["blocks"] > 0


# --- a real tokenizer and real text ---------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint: a small Llama with a byte-level BPE trained on this repository."""
    folder = tmp_path_factory.mktemp("checkpoint")
    specials = ["<|end|>", "<|user|>", "<|assistant|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train(
        [str(path) for path in (ROOT / "README.md", *sorted((ROOT / "tieredkv").glob("*.py")))],
        trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config: Any = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_server(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    """Return a server of the checkpoint, and the name of its model."""
    folder = tmp_path_factory.mktemp("chat")
    with running(folder, model=str(checkpoint)) as server:
        yield server, str(checkpoint)
        assert server.stop() == 0
        assert "Traceback" not in server.log
        assert "leaked" not in server.log, "an extension module complains of how the process ends"


def test_a_chat_about_a_document_is_served_from_the_cache_in_the_same_words(
    chat_server: tuple[Server, str],
) -> None:
    server, model = chat_server
    document = (ROOT / "README.md").read_text()[:6000] + " Größe, 容量, ёмкость, 🗄️"
    messages: list[Any] = [{"role": "user", "content": f"{document}\n\nWhat is kept?"}]
    request: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0}
    with server.client() as client:
        first, second = (client.chat.completions.create(**request, max_tokens=24) for _ in range(2))
        chunks = list(
            client.chat.completions.create(
                **request, max_tokens=24, stream=True, stream_options={"include_usage": True}
            )
        )
        messages[0]["content"] = f"{document}\n\nAnd for how long?"
        related = client.chat.completions.create(**request, max_tokens=24)
    num_tokens = first.usage.prompt_tokens
    assert 1000 < num_tokens < len(document), "the tokenizer has learned nothing"
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= num_tokens - 16
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == first.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= num_tokens - 16
    assert num_tokens - 64 < related.usage.prompt_tokens_details.cached_tokens < num_tokens


def test_a_text_is_tokenised_as_the_checkpoints_own_tokenizer_does(
    chat_server: tuple[Server, str], checkpoint: Path
) -> None:
    server, model = chat_server
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    text = (ROOT / "CONTRIBUTING.md").read_text()[:2000]
    token_ids = tokenizer(text)["input_ids"]
    by_text, by_ids = complete(server, text, model=model), complete(server, token_ids, model=model)
    assert by_text[0] == by_ids[0]
    assert sum(by_text[1].values()) == 0
    assert sum(by_ids[1].values()) >= len(token_ids) - 16
