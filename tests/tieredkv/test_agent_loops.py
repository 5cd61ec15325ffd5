"""Each turn of a loop of tools finds the answer before it, with templates of several families.

The templates are made for these tests; each writes turns as those of a family do.
"""

from typing import Any

import pytest

from tests.stress.agent_loops import BLOCK, NUM_CALLS, measure
from tests.tieredkv.channels import GEMMA_4, GPT_OSS
from tests.tieredkv.test_remembered import HERMES
from tieredkv.server.message_parser import detect

BAR = "\N{FULLWIDTH VERTICAL LINE}"


def deepseek(text: str) -> str:
    """Return a text in which `<a_b>` is written as DeepSeek writes the names of its tokens."""
    for name in ("User", "Assistant", "sep", "end_of_sentence", *(f"{kind}_{at}" for kind in (
        "tool_calls", "tool_call", "tool_output") for at in ("begin", "end"))):  # fmt: skip
        new = name.replace("sep", "tool_sep").replace("_", "\u2581")
        text = text.replace(f"<{name}>", f"<{BAR}{new}{BAR}>")
    return text


MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% elif m.role == 'assistant' %}
{{- m.content }}{% for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""

MISTRAL_V3 = MISTRAL.replace(
    "c.function.name + '[ARGS]' + c.function.arguments | tojson",
    """
'[{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}]'""",
)

DEEPSEEK = deepseek("""{% set ns = namespace(asks=false) %}{{ bos_token }}{% for m in messages %}
{%- if m.role == 'tool' %}{% set ns.asks = false %}
{{- '<tool_output_begin>' + m.content + '<tool_output_end>' }}{% elif m.role == 'assistant' %}
{{- '<Assistant></think>' if ns.asks }}{% set ns.asks = false %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_calls_begin>' if loop.first }}
{{- '<tool_call_begin>' + c.function.name + '<sep>' + c.function.arguments + '<tool_call_end>' }}
{{- '<tool_calls_end>' if loop.last }}{% endfor %}{{ '<end_of_sentence>' }}{% else %}
{%- set ns.asks = true %}{{ '<User>' + m.content }}{% endif %}{% endfor %}
{{- '<Assistant></think>' if ns.asks and add_generation_prompt }}""")

KIMI = """{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<|tool_calls_section_begin|>' if loop.first }}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments | tojson + '<|tool_call_end|>' }}
{{- '<|tool_calls_section_end|>' if loop.last }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}"""

MINIMAX = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' }}
{%- if m.reasoning_content and (keep or loop.index0 > ns.last) %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '\\n<minimax:tool_call>\\n' if loop.first }}
{{- '<invoke name="' + c.function.name + '">\\n' }}{% for k, v in c.function.arguments.items() %}
{{- '<parameter name="' + k + '">' }}{{ v if v is string else v | tojson }}
{{- '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}
{{- '</minimax:tool_call>' if loop.last }}{% endfor %}{{ '[e~[\\n' }}{% endfor %}
{{- ']~b]ai\\n<think>\\n' if add_generation_prompt }}"""

TEMPLATES = {
    "hermes": HERMES,
    "gpt-oss": GPT_OSS,
    "gemma-4": GEMMA_4,
    "mistral": MISTRAL,
    "mistral-v3": MISTRAL_V3,
    "deepseek-v3.1": DEEPSEEK,
    "kimi-k2": KIMI,
    "minimax-m2": MINIMAX,
}
THINKING = {"hermes", "minimax-m2", "gpt-oss", "gemma-4"}
of_families = pytest.mark.parametrize("family", TEMPLATES)


def measured(family: str, **how: Any) -> list[int]:
    """Return the tokens beyond the new ones; all calls must be told apart."""
    template = TEMPLATES[family]
    found = detect(template)
    assert found is not None and found.name == family
    how = {"enable_thinking": True, **how}  # Gemma's template begins an answer with none else
    figures = measure(template, thinks=family in THINKING, **how)
    assert figures.num_calls == NUM_CALLS
    return figures.beyond


@of_families
@pytest.mark.parametrize(
    "result", ["It rains.", pytest.param("It rains. " * 300, marks=pytest.mark.slow)]
)
def test_a_turn_computes_what_is_new_and_less_than_a_block(family: str, result: str) -> None:
    *loop, question = measured(family, result=result)
    assert len(loop) == NUM_CALLS and max(loop) < BLOCK
    assert (question < BLOCK) == (family not in THINKING), "the thoughts of the loop are dropped"


@of_families
def test_where_nothing_is_remembered_a_turn_computes_the_last_answer_again(family: str) -> None:
    *loop, _ = measured(family, keeps=False)
    assert min(loop) > BLOCK and max(loop) < 200


def test_an_argument_that_keeps_thoughts_saves_the_loop_at_the_next_question() -> None:
    assert max(measured("minimax-m2", keep=True)) < BLOCK
    assert max(measured("hermes", keeps_thoughts=True)) < BLOCK


@pytest.mark.parametrize("family", sorted(TEMPLATES.keys() - {"gpt-oss"}))  # drops the thoughts
def test_what_stands_before_a_call_is_found_too(family: str) -> None:
    *loop, _ = measured(family, text="Let me see.\n\n")
    assert max(loop) < BLOCK


@of_families
def test_after_a_restart_answers_are_found_if_encoding_gives_their_tokens(family: str) -> None:
    assert measured(family, draws=False, restarts=True)[NUM_CALLS - 1] < BLOCK
    assert measured(family, restarts=True)[NUM_CALLS - 1] > NUM_CALLS * BLOCK
