"""Runs `vllm serve` with a tier behind its memory, for measurements on a GPU host.

The model is a checkpoint of random weights, which `make_model` writes. Dummy weights of vLLM's own
are so small that an answer hardly depends on the keys and values before it: a wrong block would not
be seen.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tieredkv.errors import TieredKVError
from tieredkv.storage.control import StoreControl

VLLM = f"{sys.executable} -P -m vllm.entrypoints.cli.main"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 120.0
SETTLED_S = 1.0
Row = dict[str, Any]


def make_model(name: str, folder: Path) -> None:
    """Write random weights of a shape, such as `random:llama-3.1-8b`, and a tokenizer.

    A folder that has them already stays as it is.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from tieredkv.engine.checkpoint import drawn_config

    if (folder / "complete").exists():
        return
    config = drawn_config(name)
    assert config is not None, f"`{name}` names no shape"
    words = Tokenizer(WordLevel({f"t{each}": each for each in range(config.vocab_size)}, "t0"))
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model_class: Any = AutoModelForCausalLM
        model = model_class.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    (folder / "complete").touch()


class Server:
    """A running `vllm serve`.

    Attributes:
        url: without `/v1`.
        process: the server, whose children are the engine, its workers and ours.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process = url, process

    def reset(self, *, memory: bool) -> None:
        """Empty VRAM's prefix cache, and vLLM's memory behind it too if asked.

        It is refused while blocks are still on their way, so that it is tried again.

        Raises:
            TieredKVError: it was refused for a minute.
        """
        params = {"reset_external": str(memory).lower()}
        until = time.monotonic() + 60
        while time.monotonic() < until:
            answer = httpx.post(f"{self.url}/reset_prefix_cache", params=params, timeout=60)
            answer.raise_for_status()
            # vLLM 0.26 answers without a body.
            if not answer.content or answer.json().get("success", True):
                return
            time.sleep(0.1)
        raise TieredKVError("vLLM has not emptied its prefix cache for a minute")

    def metrics(self) -> dict[str, float]:
        """Return the sums of vLLM's own metrics by name."""
        sums: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if not line.startswith("#") and line.strip():
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def bytes_from_disk(self) -> int:
        """Return the bytes that the kernel has read from storage for the server's processes."""
        return sum(_read_bytes(pid) for pid in family(self.process.pid))


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (each / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(each.name))
    found, left = [pid], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def worker_of(server: Server) -> int | None:
    """Return the process of tieredkv's store worker; None while there is none."""
    for pid in family(server.process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"tieredkv.storage.worker" in words:
                return pid
    return None


def _read_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])
    return 0


def tier_config(tier: str, folder: Path, disk_size: str, options: Mapping[str, Any]) -> Row | None:
    """Return the entry of `secondary_tiers` of a tier; None for one that is vLLM's own memory."""
    if tier == "ram":
        return None
    if tier == "fs":
        return {"type": "fs", "root_dir": str(folder)} | dict(options)
    ours = {"type": "TieredKVTier", "module_path": "tieredkv.integrations.vllm"}
    return ours | {"disk_dir": str(folder), "disk_size": disk_size} | dict(options)


def stored_bytes(tier: str, folder: Path) -> int:
    """Return how many bytes of blocks a tier holds on disk."""
    if tier == "fs":
        return sum(each.stat().st_size for each in folder.rglob("*.bin"))
    return int(StoreControl(str(folder)).df()["disk"]["bytes_live"])


def wait_until_stored(tier: str, folder: Path, num_bytes: int, timeout_s: float = 120.0) -> bool:
    """Wait until a tier holds so many bytes and no more come; return whether it does."""
    until, before, since = time.monotonic() + timeout_s, -1, time.monotonic()
    while time.monotonic() < until:
        if (now := stored_bytes(tier, folder)) != before:
            before, since = now, time.monotonic()
        elif now >= num_bytes and time.monotonic() - since > SETTLED_S:
            return True
        time.sleep(0.2)
    return False


@contextlib.contextmanager
def serving(
    model: Path,
    tier: Row | None,
    *,
    memory_bytes: int,
    port: int,
    log: Path,
    flags: str = "",
    connector: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    vllm: str = VLLM,
) -> Iterator[Server]:
    """Run a server until the block ends; its log is appended to `log`.

    Args:
        model: folder of the checkpoint.
        tier: as `tier_config` returns it; None for none.
        memory_bytes: of vLLM's memory behind VRAM; 0 for a server without a connector.
        port: on which it listens.
        log: file to which its output is appended.
        flags: further ones of `vllm serve`.
        connector: further entries of `kv_connector_extra_config`.
        environment: further variables.
        vllm: command that runs vLLM.

    Raises:
        TieredKVError: it has not started.
    """
    words = [*shlex.split(vllm), "serve", str(model), "--port", str(port), *shlex.split(flags)]
    if memory_bytes:
        extra: Row = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": memory_bytes}
        extra |= {"offload_prompt_only": False, **(connector or {})}
        extra["secondary_tiers"] = [] if tier is None else [tier]
        transfer: Row = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        transfer |= {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        words += ["--kv-transfer-config", json.dumps(transfer)]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0", **(environment or {})}
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print("the server has not stopped and is killed", file=sys.stderr)  # noqa: T201
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(server: Server, log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    end = log.read_text(errors="replace")[-2000:]
    raise TieredKVError(f"`vllm serve` has not started; the end of `{log}`:\n{end}")
