"""Starts vLLM with random weights of one of our shapes, to measure both servers alike.

\b
    python -m tests.stress.vllm_dummy gemma-4-31b --port 8104 --kv-size 20GiB --host-size 48GiB

`--python` is that of the environment in which vLLM 0.33 is installed. Weights are drawn with the
deviations of `random:` shapes, prompts are token ids, and there is no tokenizer. Everything else is
as vLLM comes. Words behind `--` go to `vllm serve`. Then `ttft_by_url`, `decode_by_url` and
`sessions_by_url` measure it.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import click
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.stress import drawn_weights
from tieredkv.cli.sizing import SizeOption
from tieredkv.engine.drawn_weights import make_model
from tieredkv.engine.loader import find_model
from tieredkv.engine.quantized import unquantized_modules

PLUGIN = "drawn_weights"


def write_model(folder: Path, shape: str) -> None:
    """Write the config.json of a shape, with the text-only architecture that vLLM has for it.

    Modules that are not quantized are told by their whole paths, as vLLM reads them.
    """
    found = find_model(f"random:{shape}", dtype="bfloat16", device="cpu")
    config, whole = found.config, found.whole_config
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    folder.mkdir()
    known = config.to_dict() | {"architectures": [architecture]}
    if quantization := getattr(whole, "quantization_config", None):
        parts = "|".join(map(re.escape, unquantized_modules(whole)))
        model = make_model(config, torch.bfloat16, torch.device("meta"))
        paths = [path for path, _ in model.named_modules() if re.search(rf"(^|\.)({parts})$", path)]
        known["quantization_config"] = quantization | {"modules_to_not_convert": paths}
    (folder / "config.json").write_text(json.dumps(known, indent=1))


def write_plugin(folder: Path) -> None:
    """Write the plugin, as if it were installed in this folder."""
    info = folder / f"{PLUGIN}-1.dist-info"
    info.mkdir(parents=True)
    shutil.copy(drawn_weights.__file__, folder / f"{PLUGIN}.py")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{PLUGIN} = {PLUGIN}:register\n"
    (info / "entry_points.txt").write_text(entry)


@click.command(help=__doc__)
@click.argument("shape")
@click.argument("flags", nargs=-1)
@click.option("--port", default=8000, show_default=True)
@click.option(
    "--kv-size", type=SizeOption(), default="4GiB", show_default=True, help="VRAM of the cache."
)
@click.option(
    "--host-size", type=SizeOption(), default="16GiB", show_default=True, help="CPU offloading."
)
@click.option("--max-model-len", default=40_960, show_default=True)
@click.option("--python", default=sys.executable, help="Python of vLLM's environment.")
def main(
    shape: str,
    flags: tuple[str, ...],
    port: int,
    kv_size: float,
    host_size: float,
    max_model_len: int,
    python: str,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="vllm-dummy-"))
    write_model(folder / shape, shape)
    write_plugin(folder / "plugins")
    words = [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(folder / shape)]
    words += ["--served-model-name", shape, "--load-format", "dummy", "--skip-tokenizer-init"]
    words += ["--port", str(port), "--max-model-len", str(max_model_len)]
    words += ["--kv-cache-memory-bytes", str(int(kv_size)), "--kv-offloading-backend", "native"]
    words += ["--kv-offloading-size", str(host_size / (1 << 30)), "--enable-prompt-tokens-details"]
    places = [str(folder / "plugins"), os.environ.get("PYTHONPATH", "")]
    click.echo(" ".join([*words, *flags]), err=True)
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    os.execvpe(python, [*words, *flags], found)


if __name__ == "__main__":
    main()
