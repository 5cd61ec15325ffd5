"""A checkpoint whose answers are written in advance, for tests with real programs.

The model's next token depends on its last token alone: attention and MLP add nothing, each token of
an answer has a dimension of its own in the embeddings, and `lm_head` leads from there to the next
token. So each answer is a chain of tokens that no other answer has, and the token before it, its
cue, starts it. The chat template writes the cue behind `<|im_start|>assistant`: a message of the
user names the script ("script notes."), and the number of the assistant's messages before is the
step in it. A script with tools is followed only in requests with tools, and one without only in the
others, so that a program that asks for a title meanwhile gets a plain answer.

Everything else is real: a byte-level BPE tokenizer with special tokens, a chat template in the form
of Qwen2.5's and Hermes', and weights that transformers wrote.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = Path(__file__).with_name("scripted_model.jinja")
BOS, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT_LEN = 131_072
VOCAB_SIZE = 8192  # of the BPE; the pieces of the answers are added to it
PIECE_LEN = 8  # characters of a token of an answer, at least
SMILE = "\N{GRINNING FACE}"  # four tokens, each a byte: the end of an answer


class Script(NamedTuple):
    """What the model answers in one conversation, step by step; the last answer is repeated.

    Attributes:
        asked_by: words of the user that ask for these answers; by default `script NAME.`.
    """

    name: str
    answers: Sequence[str]
    has_tools: bool = True
    asked_by: str = ""


def call(name: str, /, **arguments: Any) -> str:
    """Return how the model writes a call of a tool."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


PLAIN = Script("plain", [f"A plain answer {SMILE}"], has_tools=False)


def write_checkpoint(folder: Path, scripts: Sequence[Script]) -> None:
    """Write a checkpoint that follows these scripts, and answers `PLAIN` to all else."""
    scripts = [*scripts, PLAIN]
    chains, pieces = _chains(scripts)
    tokenizer = _tokenizer(scripts, pieces)
    next_of = dict[int, int]()
    for cue, chain in chains.items():
        ids: Any = tokenizer.convert_tokens_to_ids([cue, *chain, TURN_END])
        assert None not in ids
        written = tokenizer.decode(ids[1:-1])
        assert tokenizer.encode(written) == ids[1:-1], f"it is read in other tokens: {chain}"
        for token_id, following in pairwise(ids):
            assert next_of.setdefault(token_id, following) == following, f"twice in {chain}"
    tokenizer.save_pretrained(folder)
    _model(next_of, len(tokenizer), tokenizer.eos_token_id).save_pretrained(folder)


def _chains(scripts: Sequence[Script]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tokens of the answer to each cue, and which of them are not in the BPE."""
    pieces, chains = list[str](), dict[str, list[str]]()
    texts = dict.fromkeys(text for script in scripts for text in script.answers)
    # JSON or a call within an answer must not be cut where one that is a whole answer begins.
    for text in sorted(texts, key=lambda text: not text.startswith(("{", "<tool_call>"))):
        num_common = max(_common(text, other) for other in texts if other != text)
        chains[text] = [*_cut(text, num_common, pieces)]
    cues = ((cue, text) for it in scripts for cue, text in zip(_cues(it), it.answers, strict=True))
    return {cue: chains[text] for cue, text in cues}, pieces


def _cut(text: str, num_common: int, pieces: list[str]) -> Iterator[str]:
    """Cut an answer into tokens and add them to the pieces; the first goes beyond what is common.

    No piece is the beginning of another one, so a text is read in the tokens it was written in.
    """
    letters = bytes_to_unicode()  # type: ignore[no-untyped-call]
    shortest = max(PIECE_LEN, num_common + 1)
    for run in re.findall(r"[\x00-\x7f]+|[^\x00-\x7f]+", text):
        if run.isascii():
            cut = _pieces_of(run, shortest, pieces)
            assert cut is not None, f"say it in other words: {text}"
            pieces += cut
            yield from cut
        else:
            yield from (letters[byte] for byte in run.encode())


def _pieces_of(text: str, shortest: int, pieces: Sequence[str]) -> list[str] | None:
    """Return the pieces of a text, of which none begins another; None if there are none."""
    if not text:
        return []
    for end in range(min(len(text), shortest), len(text) + 1):
        piece = text[:end]
        if any(piece.startswith(it) for it in pieces):
            return None
        if not any(it.startswith(piece) for it in pieces):
            rest = _pieces_of(text[end:], PIECE_LEN, [*pieces, piece])
            if rest is not None:
                return [piece, *rest]
    return None


def _common(text: str, other: str) -> int:
    """Return how many characters two texts have in common at their start."""
    same = (a == b for a, b in zip(text, other, strict=False))
    return next((i for i, is_same in enumerate(same) if not is_same), min(len(text), len(other)))


def _cues(script: Script) -> list[str]:
    """Return the special tokens that start a script's answers."""
    return [f"<|{script.name}:{i}|>" for i in range(len(script.answers))]


def _tokenizer(scripts: Sequence[Script], pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a BPE on the project's own documents and add the pieces of the answers to it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    ascii_texts = (path.read_bytes().decode("ascii", "ignore") for path in documents)
    backend.train_from_iterator(ascii_texts, trainer)
    specials = [BOS, TURN_START, TURN_END, *(cue for script in scripts for cue in _cues(script))]
    backend.add_special_tokens([AddedToken(it, normalized=False) for it in specials])
    backend.add_tokens([AddedToken(it, normalized=False) for it in pieces])
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=TURN_END,
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )
    told: list[Mapping[str, Any]] = [
        {
            "asked_by": it.asked_by or f"script {it.name}.",
            "has_tools": it.has_tools,
            "cues": _cues(it),
        }
        for it in scripts
    ]
    tokenizer.chat_template = TEMPLATE.read_text().replace("SCRIPTS", json.dumps(told))
    return tokenizer


def _model(next_of: Mapping[int, int], vocab_size: int, eos_token_id: int) -> LlamaForCausalLM:
    """Return a model that is a table; what is not in it leads to the end of the answer."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=-(-(1 + len(next_of)) // 64) * 64,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_LEN,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.zero_()
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings.zero_()
        head.zero_()
        embeddings[:, 0] = 1
        head[eos_token_id, 0] = 10
        for state, (token_id, following) in enumerate(next_of.items(), start=1):
            embeddings[token_id, 0] = 0
            embeddings[token_id, state] = 1
            head[following, state] = 10
    return model
