"""Find a checkpoint by its name, and read its configs and its tokenizer.

None of this needs modelling code, so that the server's process can do it too. Classes that import
torch are taken from `transformers` where they are used: a byte-level tokenizer does without them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import msgspec
import transformers
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.sampling_params import TokenChoice
from tieredkv.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHAPES = Path(__file__).parent / "shapes"
"""Configurations of `tiny-random` and of well-known models, for random weights of a real shape."""

TINY_NAME = "tiny-random"
RANDOM_PREFIX = "random:"

_CONFIG_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
"""Patterns of the files that are fetched from the hub for any purpose."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ADAPTER_FILE = "adapter_config.json"


class _Config(msgspec.Struct):
    """The fields of a config.json that are read before transformers reads it."""

    model_type: str
    auto_map: object = None


class _Sizes(msgspec.Struct):
    """The sizes of a config.json that a tokenizer must fit."""

    vocab_size: int
    max_position_embeddings: int


class _Generation(msgspec.Struct):
    """The fields of a generation_config.json that are used."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


def refused(name: str, reason: object) -> ModelError:
    """Return the error that says in one sentence why a model cannot be served."""
    return ModelError(f"model `{name}` cannot be served: {reason}")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, without the model.

    Raises:
        ModelError: the model or its tokenizer cannot be found or read.
    """
    file = _drawn_file(name)
    if file is not None:
        return byte_tokenizer(*_drawn_sizes(name, file))
    folder = find_folder(name)
    with refusing(name, "its tokenizer cannot be loaded", partial(_tokenizer_reason, folder)):
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    return tokenizer


def _tokenizer_reason(folder: Path, error: Exception) -> str | None:
    """Say which of a tokenizer's files is at fault, if it can be told."""
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        files = f"`{folder}` has no tokenizer.json"
        return f"{files}; copy the tokenizer's files of the original model into it"
    fast, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    for file in filter(Path.is_file, (settings, fast)):
        try:
            table = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            if file == fast:
                Tokenizer.from_file(str(file))
        except Exception as cause:  # tokenizers raises nothing narrower
            return f"`{file}` cannot be read: {reason_of(cause, str(file))}"
        if "auto_map" in table:
            return f"`{file}` names custom code (`auto_map`), which is never run"
    if not fast.is_file():
        way_out = "save it as tokenizer.json with `save_pretrained` of transformers"
        return f"`{folder}` has no tokenizer.json ({_first_line(error)}); {way_out}"
    return None


def drawn_config(name: str) -> "PreTrainedConfig | None":
    """Read the shape that `tiny-random` or `random:<shape>` names; None for any other name."""
    file = _drawn_file(name)
    return None if file is None else read_config(name, file)


def _drawn_file(name: str) -> Path | None:
    """Return the config.json of the shape that a name names; None for any other name."""
    if name == TINY_NAME:
        return SHAPES / f"{name}.json"
    if not name.startswith(RANDOM_PREFIX):
        return None
    shape = name.removeprefix(RANDOM_PREFIX)
    path = SHAPES / f"{shape.lower()}.json"
    if "/" in shape or not path.is_file():
        path = Path(shape).expanduser()
        with refusing(name, f"`{shape}` cannot be read"):
            path = path / "config.json" if path.is_dir() else path
            path.exists()  # raises where it may not be looked for
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        what = f"`{shape}` is neither a config.json nor a known shape"
        raise refused(name, f"{what}; known shapes are {known}")
    return path


def _drawn_sizes(name: str, file: Path) -> tuple[int, int]:
    """Return a shape's size of the vocabulary and its number of positions.

    The classes of transformers are asked only for what the file leaves to their defaults: each of
    them imports the modelling code, which takes a second.
    """
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        sizes = msgspec.json.decode(file.read_bytes(), type=_Sizes)
        return sizes.vocab_size, sizes.max_position_embeddings
    config = read_config(name, file).get_text_config()
    return config.vocab_size, max_model_len(config)


def read_config(name: str, path: Path) -> "PreTrainedConfig":
    """Read a config.json, or the one in a folder, without running code that lies beside it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise refused(name, f"`{path}` has no config.json")
    with refusing(name, f"`{file}` cannot be read"):
        read = msgspec.json.decode(file.read_bytes(), type=_Config)
    if read.model_type not in transformers.CONFIG_MAPPING:
        what = (
            f"transformers {transformers_version} does not know models of type `{read.model_type}`"
        )
        own = "the custom code that its `auto_map` names is never run"
        raise refused(name, f"{what}, and {own}" if read.auto_map else what)
    with refusing(name, f"`{file}` cannot be used"):
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            file, trust_remote_code=False
        )
    return config


def check_folder(name: str, folder: Path) -> None:
    """Refuse a checkpoint with an adapter, which would change what its weights mean.

    Raises:
        ModelError: there is one.
    """
    if (adapter := folder / _ADAPTER_FILE).is_file():
        what = f"an adapter lies beside it (`{adapter}`), and adapters are not applied"
        if not (folder / "config.json").is_file():
            what = f"`{folder}` holds an adapter without its model"
        way_out = "merge it into the weights first, with `merge_and_unload` of peft for example"
        raise refused(name, f"{what}; {way_out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What a model's authors recommend for its answers.

    Attributes:
        choice: how tokens are chosen where a request does not say.
        eos_token_id: tokens that end an answer.
    """

    choice: TokenChoice = TokenChoice()
    eos_token_id: tuple[int, ...] = ()


def read_generation_config(name: str, folder: Path) -> GenerationConfig:
    """Read a checkpoint's generation_config.json, if it has one.

    Like other servers this uses the parameters of `TokenChoice` and the end tokens, and no other
    field: `do_sample`, `max_new_tokens` and the rest are for `generate` of transformers.

    Raises:
        ModelError: it cannot be read, or a value is out of range.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig()
    with refusing(name, f"`{file}` cannot be read"):
        read = msgspec.json.decode(file.read_bytes(), type=_Generation)
    ends = read.eos_token_id
    given = {field: getattr(read, field) for field in TokenChoice.__slots__}
    with refusing(name, f"`{file}` cannot be used"):
        choice = TokenChoice(**{field: it for field, it in given.items() if it is not None})
    return GenerationConfig(
        choice=choice, eos_token_id=(ends,) if isinstance(ends, int) else tuple(ends or ())
    )


def find_folder(name: str, more: Sequence[str] = ()) -> Path:
    """Return the folder of a checkpoint; some files of one on the hub are fetched first.

    Args:
        name: a local folder or a hub id.
        more: patterns of files to fetch in addition to configs and tokenizer.

    Raises:
        ModelError: there is no such folder, or the files cannot be fetched.
    """
    folder = Path(name).expanduser()
    try:
        is_there = bool(name.strip()) and folder.exists()
        if is_there and folder.is_dir():
            (folder / "config.json").exists()  # raises where the folder may not be searched
            return folder
    except OSError as error:
        raise refused(name, f"`{folder}` cannot be read: {error.strerror}") from error
    if is_there:
        raise ModelError(f"model `{name}` is a file; give the folder that holds config.json")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or not name.strip():
        raise refused(name, "there is no such folder")
    wanted, others = [*_CONFIG_FILES, *more], ["*/*.safetensors", "consolidated*"]
    try:
        download = huggingface_hub.snapshot_download
        return Path(download(name, allow_patterns=wanted, ignore_patterns=others))
    except (OSError, HFValidationError) as error:  # every other error of the hub is an OSError
        what = "is not a local folder and cannot be fetched from the hub"
        raise ModelError(f"model `{name}` {what}: {_first_line(error)}") from error


def max_model_len(config: "PreTrainedConfig") -> int:
    """Return the number of positions that a model was made for."""
    return int(getattr(config, "max_position_embeddings", None) or 2048)


@contextlib.contextmanager
def refusing(
    name: str, what: str, translate: Callable[[Exception], str | None] = lambda error: None
) -> Iterator[None]:
    """Turn every exception into a refusal of the model.

    transformers, safetensors and torch raise exceptions of many types for a damaged file.

    Args:
        name: the model's name.
        what: says what failed.
        translate: returns the reason in our own words; None keeps the first line of the error.
    """
    try:
        yield
    except Exception as error:
        raise refused(name, f"{what}: {translate(error) or reason_of(error, what)}") from error


def reason_of(error: BaseException, told: str = "") -> str:
    """Return why something failed: the system's reason, or the first line of another error.

    Args:
        error: that was raised.
        told: what the reader is told already; a file that it names is not named again.
    """
    if not (isinstance(error, OSError) and error.strerror and error.errno):
        return _first_line(error)
    is_told = error.filename is None or str(error.filename) in told
    return error.strerror if is_told else f"`{error.filename}`: {error.strerror}"


def _first_line(error: BaseException) -> str:
    """Return an error's first line, and the one behind it if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text.rstrip(".")
