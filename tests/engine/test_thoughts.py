"""Where an agent's next turn goes on, with templates that drop thoughts and such that keep them.

The templates are made for these tests; they read the arguments that those of Qwen3.6 and GLM-4.7
do. The model is a tiny hybrid with recurrent states, whose answers are given.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tests.levels import few
from tests.stress.agent_loops import ARGUMENTS, ENDS, Conversation
from tieredkv import LLM, SamplingParams
from tieredkv.engine import core
from tieredkv.engine.sampler import sample
from tieredkv.server.chat import Encoded
from tieredkv.types import STATE_GRID_TOKENS

GRID = STATE_GRID_TOKENS
NUM_QUESTIONS, NUM_CALLS = 5, 3
RESULT = "It is 12 degrees in Zürich, and it rains."
THOUGHTS = "First I look at the city, then at the days, and then at the weather. "

CALLS_XML = """{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n<function=' }}
{{- c.function.name + '>\\n' }}{% for k, v in c.function.arguments.items() %}
{{- '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}
{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}"""

QWEN = (
    """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response>' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and ((preserve_thinking is defined and preserve_thinking is true)
or loop.index0 > ns.last) %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}{{ m.content }}"""
    + CALLS_XML
    + """{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""
)

GLM = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}[gMASK]<sop>{% for m in messages %}
{%- if m.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response>' }}{% elif m.role == 'assistant' %}{{ '<|assistant|>\\n' }}
{%- if m.reasoning_content and ((clear_thinking is defined and not clear_thinking)
or loop.index0 > ns.last) %}{{ '<think>' + m.reasoning_content + '</think>' }}{% else %}
{{- '</think>' }}{% endif %}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}
{%- endfor %}{% else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}"""

TEMPLATES = {"qwen": QWEN, "glm": GLM}


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny hybrid that knows the tokens of the templates."""
    folder = tmp_path_factory.mktemp("model")
    model_type, told = FAMILIES["qwen3_5"]
    layers = ["linear_attention", "full_attention"]
    changes = {"max_position_embeddings": 8192, "vocab_size": 1024, "layer_types": layers}
    write_checkpoint(folder, make_config(model_type, told | changes | {"num_hidden_layers": 2}))
    return folder


class Turn:
    """Where a turn may go on, and where it did.

    Attributes:
        num_found: how many tokens of its prompt were found.
        answer_end: how many tokens of the turn before were computed, its answer included.
        question_end: how many of its tokens stand before the end of the question before its own.
        is_question: whether it begins with a question, and not with the result of a call.
    """

    def __init__(self, num_found: int, answer_end: int, question_end: int) -> None:
        self.num_found, self.answer_end, self.question_end = num_found, answer_end, question_end
        self.is_question = False


class Agent(Conversation):
    """A conversation whose prompts an engine computes, and whose answers are given to it."""

    def __init__(self, open_llm: Callable[[], LLM], template: str, **arguments: Any) -> None:
        super().__init__(template, **arguments)
        self._open, self.llm = open_llm, open_llm()
        self.script: Iterator[int] = iter(())
        self.turns = list[Turn]()
        self._answer_end = self._question_end = 0

    def reopen(self) -> None:
        """Close the engine and open another one, which has what is on disk."""
        self.llm.close()
        self.llm = self._open()

    def compute(self, encoded: Encoded, ids: Sequence[int]) -> int:
        """Have the engine compute a prompt and its answer."""
        self.script = iter(ids)
        params = SamplingParams(max_tokens=len(ids), temperature=0, ignore_eos=True)
        asked = self.llm.make_request(encoded.token_ids, params, anchors=encoded.anchors)
        [answer] = self.llm.serve([asked])
        self.llm.core.cache.check()
        assert answer.token_ids == [*ids]
        num_found = answer.usage.cached_tokens
        self.turns.append(Turn(num_found, self._answer_end, self._question_end))
        self._answer_end = len(encoded.token_ids) + len(ids) - 1
        self._question_end = encoded.anchors[0]
        return num_found

    def ask(self, question: str) -> None:
        """Ask a question, which the model answers behind some calls of a tool."""
        if self.turns:
            self.messages.append({"role": "user", "content": [question]})
        end_of_call, end = ENDS.get(self.family.name, ("<|im_end|>",) * 2)
        first = len(self.turns)
        for i in range(NUM_CALLS):
            call = self.family.writes.replace("{name}", "get_weather")
            call = call.replace("{arguments}", ARGUMENTS[self.family.style] % i)
            reply = self.answer(THOUGHTS, call, end_of_call)
            [told] = reply.calls
            result = {"role": "tool", "tool_call_id": told.id, "content": [RESULT]}
            self.messages.append(result)
        self.answer(THOUGHTS, "It is cold, and   it rains.", end)
        self.turns[first].is_question = True


@pytest.mark.parametrize(
    ("family", "arguments", "keeps", "is_reopened"),
    few(
        [
            ("qwen", {}, False, True),
            ("glm", {"clear_thinking": False}, True, False),
            ("qwen", {"preserve_thinking": True}, True, False),
            ("glm", {}, False, False),
            ("qwen", {}, False, False),
            ("qwen", {"preserve_thinking": True}, True, True),
            ("qwen", {"enable_thinking": False}, False, False),
            ("qwen", {"enable_thinking": False, "preserve_thinking": True}, True, False),
            ("glm", {"clear_thinking": True}, False, True),
            ("glm", {"clear_thinking": False}, True, True),
            ("glm", {"enable_thinking": False}, True, False),
        ],
        2,
    ),
)
def test_twenty_turns_of_an_agent_go_on_at_the_answer_or_at_the_question_before(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    arguments: dict[str, Any],
    keeps: bool,
    is_reopened: bool,
) -> None:
    sizes: dict[str, Any] = {"device_size": "32MiB", "host_size": "32MiB", "block_size": 16}
    disk: dict[str, Any] = {"disk_dir": str(tmp_path), "disk_size": "256MiB", "restore": "load"}
    disk |= {"default_retention": "24h"}

    def open_llm() -> LLM:
        return LLM(str(folder), device="cpu", **sizes, **(disk if is_reopened else {}))

    agent = Agent(open_llm, TEMPLATES[family], **arguments)

    def scripted(logits: torch.Tensor, states: Any, _: Any) -> Any:
        return sample(logits, states, torch.tensor([next(agent.script)]))

    monkeypatch.setattr(core, "sample", scripted)
    for i in range(NUM_QUESTIONS):
        if i and is_reopened:
            agent.reopen()
        agent.ask(f"And what is the weather on day {i} of the next month, in the same city?")
    agent.llm.close()
    assert len(agent.turns) == NUM_QUESTIONS * (NUM_CALLS + 1) == 20
    for turn in agent.turns[1:]:
        expected = turn.question_end if turn.is_question and not keeps else turn.answer_end
        assert turn.num_found >= expected // GRID * GRID
        if turn.is_question and not keeps:
            assert turn.num_found < turn.question_end + GRID, "the thoughts were dropped"
