"""The tiny random model has the promised sizes and tokenizer, and its answers need the context."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.engine.harness import limits_of
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.runner import ModelRunner, make_kv_pool
from tieredkv.engine.step_buffers import BatchRow


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return find_model("tiny-random", device="cpu").load()


def test_the_tiny_model_has_the_promised_shape(loaded: LoadedModel) -> None:
    assert loaded.layers == [(8, 2, 32, index, None, None) for index in range(4)]
    assert loaded.dtype == "float32"
    assert loaded.kv_spec(16).token_bytes == 2048
    assert loaded.vocab_size <= 512
    assert loaded.max_model_len >= 16384


@pytest.mark.parametrize("text", ["", "plain", " spaced  out\n", "naïve 東京 🗼", "\x00\x7f"])
def test_text_survives_the_byte_tokenizer(loaded: LoadedModel, text: str) -> None:
    ids = loaded.tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert loaded.tokenizer.decode(ids) == text


def test_the_server_imports_no_torch_for_the_byte_tokenizer() -> None:
    code = (
        "import sys, tieredkv.server.run; from tieredkv.engine.checkpoint import load_tokenizer; "
        "tokenizer = load_tokenizer('tiny-random'); "
        "sys.exit('torch' in sys.modules or len(tokenizer) != 264)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("given", [{}, {"vocab_size": 300}, {"max_position_embeddings": 512}])
def test_a_shape_that_leaves_sizes_out_has_those_of_its_family(
    given: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | given))
    tokenizer, expected = load_tokenizer(f"random:{tmp_path}"), LlamaConfig(**given)
    assert len(tokenizer) == expected.vocab_size
    assert tokenizer.model_max_length == expected.max_position_embeddings


def test_every_token_of_a_large_vocabulary_decodes_to_text() -> None:
    tokenizer = byte_tokenizer(1000, 128)
    assert len(tokenizer) == 1000
    assert tokenizer.decode([65, 264, 999]) == "A t264 t999"
    assert tokenizer(" t999")["input_ids"] == list(b" t999")


def test_the_chat_template_marks_turns(loaded: LoadedModel) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    text = loaded.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = loaded.tokenizer(text)["input_ids"]
    assert ids[0] == 258
    assert loaded.eos_token_ids == {257, 259}


def test_a_wrong_block_early_in_the_context_changes_the_answer(loaded: LoadedModel) -> None:
    spec = loaded.kv_spec(16)
    pool = make_kv_pool(spec, 40, loaded.device)
    runner = ModelRunner(loaded, pool, spec, limits_of(loaded))
    table = list(range(40))
    ids = [32 + i * 7 % 95 for i in range(480)]

    def answer() -> list[int]:
        out = [
            int(runner.execute([BatchRow(ids[-1:], 479, table, write_from=480)]).logits.argmax())
        ]
        for i in range(40):
            out.append(int(runner.execute([BatchRow(out[-1:], 480 + i, table)]).logits.argmax()))
        return out

    runner.execute([BatchRow(ids, 0, table)])
    right = answer()
    assert answer() == right
    pool[3] = pool[4].clone()
    assert answer() != right


def test_greedy_answers_are_printable_and_do_not_end(loaded: LoadedModel) -> None:
    weight = loaded.model.get_parameter("lm_head.weight")
    with torch.inference_mode():
        logits = torch.randn(200, 256, generator=torch.Generator().manual_seed(1)) @ weight.T
    assert all(0x20 <= token < 0x7F for token in logits.argmax(-1).tolist())
