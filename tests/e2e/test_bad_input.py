"""Bad input on the command line gets one clear sentence and changes nothing.

Other files test unknown keys and values of settings (tests/tieredkv/test_config.py), every kind of
attention that is refused (tests/engine/test_suitability.py), damaged checkpoints
(tests/engine/test_loader.py) and wrong requests over HTTP (tests/e2e/test_serve.py).
"""

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from tests.golden import refused, told
from tests.levels import few
from tieredkv import LLM, SamplingParams
from tieredkv.cli.main import main
from tieredkv.errors import BlocksLostError, RequestError
from tieredkv.types import Tier

SIZES = ("--device-size", "2MiB", "--host-size", "2MiB", "--max-tokens", "2")
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
TEXT = "y" * 200

Result = tuple[int, str, str]
Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def run(*arguments: object) -> Result:
        exit_code = main([str(each) for each in arguments])
        return exit_code, *capfd.readouterr()

    return run


@pytest.fixture
def generate(run: Run, tmp_path: Path) -> Run:
    """Return a function that runs `generate`; its disk tier is `tmp_path / "kv"` by default."""

    def generate(*arguments: object, model: object = "tiny-random", prompt: str = TEXT) -> Result:
        where = () if "--disk-dir" in arguments else ("--disk-dir", tmp_path / "kv")
        return run("generate", model, prompt, *SIZES, *where, *arguments)

    return generate


def refusal(result: Result, exit_code: int) -> str:
    """Return the one sentence on stderr of a command that was refused, and its hints.

    A store may have been made before, which tells where its master key is.
    """
    assert result[0] == exit_code, result
    assert result[1] == ""
    lines = [line for line in result[2].splitlines() if "its master key was made" not in line]
    assert all(hint.startswith("hint: ") for hint in lines[1:]), result[2]
    assert lines[0].startswith("error: "), result[2]
    return "\n".join(lines).removeprefix("error: ")


def contents(folder: Path) -> list[tuple[str, int, bytes | None]]:
    """Return the names, modes and bytes of everything in a folder."""
    return sorted(
        (str(path.relative_to(folder)), path.stat().st_mode, path.read_bytes())
        if path.is_file()
        else (str(path.relative_to(folder)), path.stat().st_mode, None)
        for path in folder.rglob("*")
    )


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs on a new folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tieredkv-test", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# --- models, prompts, settings --------------------------------------------------------------------


def test_an_unknown_model_is_named_before_a_store_is_made(generate: Run, tmp_path: Path) -> None:
    message = refusal(generate(model="no/such-model"), 2)
    told(re.sub("(from the hub:).*", r"\1 CAUSE", message))
    assert not (tmp_path / "kv").exists()


def test_a_window_of_no_token_is_refused(generate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    config: Any = MistralConfig(sliding_window=0, num_hidden_layers=1, hidden_size=64)
    config.save_pretrained(folder)
    told(refusal(generate(model=folder), 2))
    assert not (tmp_path / "kv").exists()


def test_a_prompt_longer_than_the_context_names_both_lengths(generate: Run) -> None:
    told(refusal(generate("--max-model-len", 128), 2))


def test_half_of_a_surrogate_pair_in_a_prompt_is_replaced(generate: Run) -> None:
    said = []
    for prompt in ("a\ud83d", "a\N{REPLACEMENT CHARACTER}"):
        exit_code, output, _ = generate("--json", prompt=prompt)
        assert exit_code == 0
        said.append(json.loads(output)["outputs"][0])
    assert said[0]["token_ids"] == said[1]["token_ids"]
    assert said[0]["usage"]["prompt_tokens"] == said[1]["usage"]["prompt_tokens"]


def test_an_empty_prompt_is_refused(generate: Run) -> None:
    told(refusal(generate(prompt=""), 2))


def test_one_bad_prompt_of_several_leaves_nothing_running(tmp_path: Path) -> None:
    with LLM("tiny-random", device_size="2MiB", host_size="2MiB") as llm:
        with refused(RequestError, param="prompt"):
            llm.generate([TEXT, ""], GREEDY)
        [output] = llm.generate(TEXT, GREEDY)
        assert len(output.token_ids) == 4
        llm.core.cache.check()


def test_the_python_api_takes_more_prompts_than_the_queue_holds(tmp_path: Path) -> None:
    with LLM("tiny-random", device_size="2MiB", host_size="2MiB", max_num_queued_reqs=2) as llm:
        assert len(llm.generate([TEXT] * 5, GREEDY)) == 5


def test_an_unknown_retention_lists_the_known_ones(generate: Run, tmp_path: Path) -> None:
    told(refusal(generate("--default-retention", "48h"), 2))
    with (
        LLM("tiny-random", device_size="2MiB", host_size="2MiB") as llm,
        refused(RequestError, param="prompt_cache_retention", code="invalid_value"),
    ):
        llm.generate(TEXT, GREEDY, retention="48h")


@pytest.mark.parametrize(
    "text",
    [
        "[cache]\nhost_sise = 1\n",
        "[cash]\nhost_size = 1\n",
        "[server]\nhost_size = 1\n",
        '[retention.24h]\nidel = "1h"\n',
    ],
)
def test_an_unknown_key_in_a_config_names_the_nearest(
    text: str, generate: Run, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    told(refusal(generate("--config", file), 2))
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("flag", "size"),
    [("--device-size", "40KiB"), ("--host-size", "4KiB"), ("--disk-size", "40KiB")],
)
def test_a_budget_smaller_than_a_block_names_the_least(
    flag: str, size: str, generate: Run, tmp_path: Path
) -> None:
    answer = refusal(generate(flag, size), 2)
    told(answer)
    assert not (tmp_path / "kv").exists()
    least = answer.rpartition("at least ")[2]
    exit_code, _, stderr = generate(flag, least.replace(" ", ""), prompt="x")
    assert exit_code == 0, stderr


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_of_others_is_left_alone(generate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir(0o700)
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    told(refusal(generate("--disk-dir", folder), 1))
    assert contents(folder) == before


def test_a_folder_that_others_can_write_to_is_refused(generate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    told(refusal(generate("--disk-dir", folder), 1))
    assert contents(folder) == []
    assert folder.stat().st_mode & 0o777 == 0o777


def test_a_path_through_a_file_is_refused(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "kv"):
        told(refusal(generate("--disk-dir", path), 1), hide={str(file): "FILE"})
    assert file.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused(generate: Run, tmp_path: Path) -> None:
    with mounted(tmp_path / "read-only", "ro") as folder:
        for path in (folder, folder / "kv"):
            told(refusal(generate("--disk-dir", path), 1), hide={str(folder): "FOLDER"})


def test_a_store_in_use_names_its_writer(generate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with LLM("tiny-random", disk_dir=folder, device_size="2MiB", host_size="2MiB") as llm:
        told(refusal(generate(), 1), hide={str(llm.core.info.worker_pid): "PID"})
        [output] = llm.generate(TEXT, GREEDY)  # the first process still works
        assert len(output.token_ids) == 4


# --- stores ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stopped store that holds the 12 blocks of `TEXT`; each test copies it."""
    folder = tmp_path_factory.mktemp("made") / "kv"
    sizes: dict[str, Any] = {
        "device_size": "2MiB",
        "host_size": "2MiB",
        "disk_key_dir": folder.with_name("keys"),
    }
    with LLM("tiny-random", retention="24h", disk_dir=folder, **sizes) as llm:
        llm.generate(TEXT, GREEDY)
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the store that a test may damage, with a copy of its keys."""
    keys = shutil.copytree(made.with_name("keys"), tmp_path / "keys")
    monkeypatch.setenv("TIEREDKV_DISK_KEY_DIR", str(keys))
    return Path(shutil.copytree(made, tmp_path / "kv"))


def test_another_format_version_is_refused_and_left_as_it_is(
    store: Path, generate: Run, run: Run
) -> None:
    marker = store / "format.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"version": 9}))
    before = contents(store)
    verbs = [["df"], ["ls"], ["verify"], ["evict", "--all", "-y"]]
    for result in (generate(), *(run(*verb, "--disk-dir", store) for verb in verbs)):
        told(refusal(result, 1))
    assert contents(store) == before


def garbage(data: bytes) -> bytes:
    """Return random bytes of the same length."""
    return random.Random(1).randbytes(len(data))


def half(data: bytes) -> bytes:
    """Return the first half of the bytes."""
    return data[: len(data) // 2]


def noise_behind_the_meta_pages(data: bytes) -> bytes:
    """Keep the two meta pages, so that LMDB opens the file, and replace the rest with noise."""
    return data[:8192] + garbage(data[8192:])


@pytest.mark.parametrize("healer", ["verify", "the next server"])
@pytest.mark.parametrize("damage", few([garbage, half, noise_behind_the_meta_pages]))
def test_a_damaged_index_is_made_again_and_costs_no_request(
    damage: Callable[[bytes], bytes], healer: str, store: Path, generate: Run, run: Run
) -> None:
    index = store / "index" / "data.mdb"
    index.write_bytes(damage(index.read_bytes()))
    before = contents(store)
    exit_code, stdout, _ = run("df", "--disk-dir", store, "--json")
    [need] = json.loads(stdout.splitlines()[-1])["needs"]
    assert (exit_code, need["code"]) == (1, "index_damaged")
    assert contents(store) == before

    if healer == "verify":
        exit_code, stdout, _ = run("verify", "--disk-dir", store, "--json")
        found = json.loads(stdout.splitlines()[-1])
        assert (exit_code, found["by_reason"], found["repaired"]) == (1, {"index": 1}, 1)
    outputs = []
    for _ in range(2):
        exit_code, stdout, _ = generate("--default-retention", "24h", "--json")
        assert exit_code == 0
        outputs += json.loads(stdout.splitlines()[-1])["outputs"]
        assert outputs[-1]["usage"]["cached_tokens_by_tier"]["disk"] == 192
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert (store / "index.bad" / "data.mdb").exists()


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--block-size", "32")])
def test_a_store_of_another_dtype_or_layout_is_a_miss_and_stays_good(
    flags: tuple[str, str], store: Path, generate: Run
) -> None:
    cached = []
    for more in (flags, ()):
        exit_code, stdout, stderr = generate("--default-retention", "24h", "--json", *more)
        assert exit_code == 0, stderr
        [output] = json.loads(stdout.splitlines()[-1])["outputs"]
        cached.append(output["usage"]["cached_tokens_by_tier"]["disk"])
    assert cached == [0, 192]


def test_a_lost_index_is_made_again_from_the_extents(store: Path, generate: Run) -> None:
    (store / "index" / "data.mdb").write_bytes(b"")
    exit_code, stdout, stderr = generate("--default-retention", "24h", "--json")
    assert exit_code == 0
    [output] = json.loads(stdout.splitlines()[-1])["outputs"]
    assert output["usage"]["cached_tokens_by_tier"]["disk"] == 192
    told(stderr.splitlines()[-1].partition("WARNING: ")[2])


def test_blocks_give_way_on_a_full_disk_and_every_request_is_served(tmp_path: Path) -> None:
    prompts = [random.Random(i).choices(range(256), k=1000) for i in range(4)]
    sizes: dict[str, Any] = {"device_size": "4MiB", "host_size": "4MiB", "disk_size": "1GiB"}
    with (
        mounted(tmp_path / "small", "size=2m") as folder,
        suppress(BlocksLostError),  # of what is owed at the end, too
        LLM("tiny-random", retention="24h", disk_dir=folder, restore="load", **sizes) as llm,
    ):
        cold = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert llm.demote("disk")
        # The last one first, since what is computed again makes others on disk give way.
        again = [llm.generate(prompt, GREEDY)[0] for prompt in reversed(prompts)][::-1]
        assert [each.token_ids for each in again] == [each.token_ids for each in cold]
        llm.core.cache.check()
        stats: Any = llm.tier_stats()
        from_disk = [each.usage.cached_tokens_by_tier[Tier.DISK] for each in again]
        assert any(from_disk), "what had room is not served"
    assert stats["disk"]["num_evicted"] > 0
    assert 1 << 20 < stats["disk"]["bytes_files"] <= 2 << 20
