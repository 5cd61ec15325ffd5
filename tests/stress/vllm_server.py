"""Runs `vllm serve` with a tier behind its memory, for measurements on a GPU host.

The model is a checkpoint of random weights, which `make_model` writes. Dummy weights of vLLM's own
are so small that an answer hardly depends on the keys and values before it: a wrong block would not
be seen.
"""

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
import httpx

from tests import http
from tests.stress.vllm_dummy import write_model, write_plugin
from tieredkv.cli.bench_options import with_options
from tieredkv.errors import TieredKVError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df
from tieredkv.units import parse_bytes

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
    from transformers import AutoModelForCausalLM

    from tieredkv.engine.checkpoint import drawn_config

    if (folder / "complete").exists():
        return
    config = drawn_config(name)
    assert config is not None, f"`{name}` names no shape"
    write_tokenizer(folder, config.vocab_size)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model_class: Any = AutoModelForCausalLM
        model = model_class.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    (folder / "complete").touch()


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one word for each token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{each}": each for each in range(vocab_size)}, "t0"))
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(folder)


def make_drawn(name: str, folder: Path) -> None:
    """Write what vLLM needs to draw the weights of a shape itself; see `vllm_dummy`."""
    shape = name.removeprefix("random:")
    if not (folder / shape / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / shape, shape)
        config = json.loads((folder / shape / "config.json").read_text())
        write_tokenizer(folder / shape, config["vocab_size"])
        write_plugin(folder / "plugins")
        (folder / shape / "complete").touch()


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
            answer = http.post(f"{self.url}/reset_prefix_cache", params=params, timeout=60)
            answer.raise_for_status()
            # vLLM 0.26 answers without a body.
            if not answer.content or answer.json().get("success", True):
                return
            time.sleep(0.1)
        raise TieredKVError("vLLM has not emptied its prefix cache for a minute")

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of vLLM's memory."""
        text = http.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(r'vllm:cache_config_info\{[^}]*[{,]block_size="(\d+)"', text)
        assert found is not None, "vLLM does not tell its block size"
        return int(found.group(1))

    def metrics(self) -> dict[str, float]:
        """Return the sums of the metrics of vLLM's memory and of its tiers, by name."""
        sums: dict[str, float] = {}
        for line in http.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            is_ours = "kv_offload" in name or "tieredkv" in name
            if is_ours and not name.endswith(("_bucket", "_created")):
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


def stored_bytes(tier: str, folder: Path) -> int:
    """Return how many bytes of blocks a tier holds on disk."""
    if tier == "fs":
        return sum(each.stat().st_size for each in folder.rglob("*.bin"))
    return int(StoreControl(str(folder)).answer(Df())["disk"]["bytes_live"])


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


class Setup(NamedTuple):
    """What a measurement is told of the servers that it runs, see `with_setup`.

    Attributes:
        folder: on the disk.
        model_dir: folder of the checkpoint.
        memory_bytes: of vLLM's memory behind VRAM.
        disk_size: budget of tieredkv's tier.
        tier_options: further arguments of that.
        connector: further entries of `kv_connector_extra_config`.
        kv_connector: ours or vLLM's, for our tier.
        plugins: folder of vLLM's plug-in that draws weights, if they are drawn.
        flags: further ones of `vllm serve`.
        vllm: command that runs vLLM.
        port: on which servers listen.
        log: file to which their output is appended.
    """

    folder: Path
    model_dir: Path
    memory_bytes: int
    disk_size: str
    tier_options: Row
    connector: Row
    kv_connector: str
    plugins: Path | None
    flags: str
    vllm: str
    port: int
    log: Path

    @property
    def config(self) -> Row:
        """The model's config.json."""
        config: Row = json.loads((self.model_dir / "config.json").read_text())
        return config

    def beside(self, flags: str) -> "Setup":
        """Return the setup of a server with these flags that runs beside another one."""
        log = self.log.with_name(f"{self.log.name}.beside")
        return self._replace(port=self.port + 1, log=log, flags=flags)

    def tier(self, name: str, folder: Path) -> Row | None:
        """Return the entry of `secondary_tiers` of a tier; None for vLLM's own memory alone."""
        if name == "ram":
            return None
        if name == "fs":
            return {"type": "fs", "root_dir": str(folder)}
        ours = {"type": "TieredKVTier", "module_path": "tieredkv.integrations.vllm"}
        ours |= {"default_retention": "24h", "disk_dir": str(folder), "disk_size": self.disk_size}
        if self.plugins is not None:
            ours["weights_id"] = "drawn"
        return ours | self.tier_options

    @contextlib.contextmanager
    def serving(
        self,
        tier: Row | None,
        *,
        has_memory: bool = True,
        flags: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """Run a server until the block ends.

        Args:
            tier: as `tier` returns it.
            has_memory: whether vLLM has memory behind VRAM.
            flags: more of them.
            environment: further variables.

        Raises:
            TieredKVError: it has not started.
        """
        words = [*shlex.split(self.vllm), "serve", str(self.model_dir), "--port", str(self.port)]
        words.append("--enable-prompt-tokens-details")  # else `usage` has no cached tokens
        words += shlex.split(f"{self.flags} {flags}")
        if has_memory:
            extra: Row = {"spec_name": "TieringOffloadingSpec"}
            extra |= {"cpu_bytes_to_use": self.memory_bytes, "offload_prompt_only": False}
            extra |= {**self.connector, "secondary_tiers": [] if tier is None else [tier]}
            is_ours = tier is not None and tier["type"] == "TieredKVTier"
            name = self.kv_connector if is_ours else "OffloadingConnector"
            transfer: Row = {"kv_connector": name, "kv_role": "kv_both"}
            if name == "TieredKVConnector":
                transfer["kv_connector_module_path"] = "tieredkv.integrations.vllm_connector"
            transfer |= {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
            words += ["--kv-transfer-config", json.dumps(transfer)]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0", **(environment or {})}
        if self.plugins is not None:
            words += ["--load-format", "dummy"]
            places = [str(self.plugins), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{self.port}", process)
        try:
            _wait_until_ready(server, self.log)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print("the server has not stopped and is killed", file=sys.stderr)  # noqa: T201
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


a_path = click.Path(path_type=Path)
OPTIONS = (
    click.option("--folder", type=a_path, required=True, help="On the disk."),
    click.option(
        "--model-dir",
        type=a_path,
        required=True,
        help="Folder of the checkpoint; if it has none, one of --shape is written.",
    ),
    click.option("--shape", default="random:llama-3.1-8b", show_default=True, help="Of the model."),
    click.option(
        "--drawn", is_flag=True, help="Have vLLM draw the weights: --model-dir gets none of them."
    ),
    click.option(
        "--kv-connector",
        type=click.Choice(["OffloadingConnector", "TieredKVConnector"]),
        default="OffloadingConnector",
        help="For our tier; models with several groups of layers need ours.",
    ),
    click.option("--memory-size", default="24GiB", show_default=True, help="vLLM's memory."),
    click.option("--disk-size", default="40GiB", show_default=True, help="Budget of tieredkv."),
    click.option("--tier-options", default="{}", help="Further arguments of our tier, as JSON."),
    click.option("--connector", default="{}", help="More `kv_connector_extra_config`, as JSON."),
    click.option("--flags", default="", help="Further flags of `vllm serve`."),
    click.option("--vllm", default=VLLM, help="Command that runs vLLM."),
    click.option("--port", default=8123, show_default=True),
    click.option("--log", type=a_path, default=Path("vllm.log"), help="Of the servers."),
)


def with_setup(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a `Setup`, and call it with that as `setup`."""

    @functools.wraps(command)
    def run(
        *,
        folder: Path,
        model_dir: Path,
        shape: str,
        drawn: bool,
        memory_size: str,
        tier_options: str,
        connector: str,
        **others: Any,
    ) -> None:
        plugins = model_dir / "plugins" if drawn else None
        (make_drawn if drawn else make_model)(shape, model_dir)
        model_dir = model_dir / shape.removeprefix("random:") if drawn else model_dir
        names = ("disk_size", "kv_connector", "flags", "vllm", "port", "log")
        known = {name: others.pop(name) for name in names}
        setup = Setup(
            folder=folder,
            model_dir=model_dir,
            memory_bytes=parse_bytes(memory_size),
            tier_options=json.loads(tier_options),
            connector=json.loads(connector),
            plugins=plugins,
            **known,
        )
        command(setup=setup, **others)

    return cast(Callable[..., None], with_options(OPTIONS)(run))


def _wait_until_ready(server: Server, log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if http.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    end = log.read_text(errors="replace")[-2000:]
    raise TieredKVError(f"`vllm serve` has not started; the end of `{log}`:\n{end}")
