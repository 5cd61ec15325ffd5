"""How much of an agent's prompt is computed again, with the chat template of any model.

A loop of ten calls of a tool, an answer and a further question are rendered and encoded as the
server does it, with answers whose ids are not those that encoding their text would give, and with
white space and orders of keys that no template prints. No model runs. It tells the tokens that each
turn computes beyond the new ones: less than a block if the answer before was found, and all of the
answer if it was not.

    python -m tests.stress.agent_loops FOLDER [--argument NAME=JSON]...

renders with each `*.jinja` of a folder whose family is known. The last line of the output is JSON.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.tieredkv.test_remembered import LETTERS, SPECIAL, Session, made_tokenizer, message_of
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.server.chat import Tokenization
from tieredkv.server.message_parser import Family, detect
from tieredkv.server.reply import Reply

BLOCK = 16
NUM_CALLS = 10
RESULT = "It is 12 degrees in Zürich, and it rains."
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "array", "items": {"type": "integer"}, "description": "When."},
    },
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Look.", "parameters": PARAMETERS},
    }
]
ARGUMENTS = {
    "json": '{"days":[%d,2] , "city":"Z\\u00fcrich"}',
    "qwen_xml": "<parameter=days>\n[%d,2]\n</parameter>\n<parameter=city>\nZürich\n</parameter>",
    "minimax_xml": '<parameter name="days">[%d,2]</parameter>\n<parameter name="city">Zürich'
    "</parameter>",
    "glm_xml": "\n<arg_key>days</arg_key>\n<arg_value>[%d,2]</arg_value>\n<arg_key>city</arg_key>"
    "<arg_value>Zürich</arg_value>",
}

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_DEEPSEEK_END = f"<{_BAR}end\u2581of\u2581sentence{_BAR}>"
ENDS = {
    "llama3": ("<|eot_id|>", "<|eot_id|>"),
    "gpt-oss": ("<|call|>", "<|return|>"),
    "glm": ("<|observation|>", "<|user|>"),
    "deepseek-v3": (_DEEPSEEK_END, _DEEPSEEK_END),
    "deepseek-v3.1": (_DEEPSEEK_END, _DEEPSEEK_END),
    "mistral": ("</s>", "</s>"),
    "mistral-v3": ("</s>", "</s>"),
    "minimax-m2": ("[e~[", "[e~["),
    "seed-oss": ("<seed:eos>", "<seed:eos>"),
}
"""The tokens that end calls and other answers; `<|im_end|>` for the other families."""

_TOKENS = re.compile(
    rf"<\|[\w\s:/.]{{1,40}}\|>|<{_BAR}[^{_BAR}<>]{{1,40}}{_BAR}>|</?think>|</?seed:\w+>"
    r"|\[/?[A-Z]+(?:_[A-Z]+)?\]|\]~!?b[\]\[]|\[e~\["
)
"""Finds the names of tokens in a chat template."""


class Figures(NamedTuple):
    """What a conversation cost.

    Attributes:
        beyond: tokens that each turn after the first computed beyond the new ones: those after a
            call, the one after the last result, and the one after a further question.
        num_calls, num_thoughts: how many calls, and answers with thoughts, were told apart.
    """

    beyond: list[int]
    num_calls: int
    num_thoughts: int


def tokenizer_of(template: str, family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has the tokens of a chat template.

    Those of DeepSeek are not special but for the first and the last, as in its checkpoints.
    """
    end = ENDS.get(family.name, ("<|im_end|>",) * 2)
    names = {*_TOKENS.findall(template), *end, "<s>"} - {"<think>", "</think>"}
    is_deepseek = family.name.startswith("deepseek")
    special = [it for it in sorted(names) if not is_deepseek or "sentence" in it]
    tokenizer = made_tokenizer(template, [*SPECIAL, *special])
    others = sorted({*names, "<think>", "</think>"} - {*special})
    tokenizer.add_tokens([AddedToken(it, normalized=False) for it in others])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", end[1]
    return tokenizer


class Conversation:
    """One conversation with a model that writes as a family does.

    Args:
        template: the chat template.
        keeps: whether answers are remembered.
        arguments: for the template.
    """

    def __init__(self, template: str, *, keeps: bool = True, **arguments: Any) -> None:
        family = detect(template)
        assert family is not None, "the family of the template is not known"
        self.family, self._tokenizer = family, tokenizer_of(template, family)
        self._tokenization = Tokenization(
            self._tokenizer, family=family, template_arguments=arguments
        )
        self._session = Session(self._tokenization, (1 << 24) if keeps else 0)
        self._vocabulary = self._tokenizer.get_vocab()
        self._added = {it.content for it in self._tokenizer.added_tokens_decoder.values()}
        self._blocks = set[tuple[int, ...]]()
        self._whole = list[int]()
        self.messages: list[Any] = [
            {"role": "system", "content": ["You help."]},
            {"role": "user", "content": ["What is the weather?"]},
        ]
        self.beyond = list[int]()

    def answer(self, thoughts: str, text: str, end: str) -> Reply:
        """Have the model write an answer, which becomes a part of the conversation."""
        encoded = self._session.encode(self.messages, TOOLS)
        prompt, cached = encoded.token_ids, 0
        while tuple(prompt[: cached + BLOCK]) in self._blocks and cached + BLOCK < len(prompt):
            cached += BLOCK
        if self._whole:
            self.beyond.append(len(prompt) - cached - max(0, len(prompt) - len(self._whole)))
        ids = [*self._sampled(self._written(encoded.text, thoughts) + text), self._vocabulary[end]]
        tokenization = self._tokenization.of(
            self._session.memory.namespace, None, self._session.memory
        )
        request = EngineRequest(params=SamplingParams())
        reply = Reply(request, self._tokenizer, tokenization.reading(encoded, TOOLS))
        reply.read(TokenOutput(request_id="", token_ids=ids, finish_reason="stop"))
        self._whole = [*prompt, *ids[:-1]]  # The last token of an answer is not computed.
        ends = range(BLOCK, len(self._whole) + 1, BLOCK)
        self._blocks |= {tuple(self._whole[:end]) for end in ends}
        message = message_of(reply)
        for call in message.get("tool_calls", ()):
            call["type"] = "function"
        self.messages.append({**message, "content": [reply.content] * bool(reply.content)})
        return reply

    def _written(self, prompt: str, thoughts: str) -> str:
        """Return thoughts as the model goes on with them after its prompt."""
        if not self.family.thinks:
            return ""
        opens, closes = self.family.thinks
        begun = self.family.begun(prompt).rstrip()
        if begun.endswith(closes) or not (thoughts or begun.endswith(opens)):
            return ""
        return ("" if begun.endswith(opens) else opens) + thoughts + closes

    def _sampled(self, text: str) -> list[int]:
        """Return ids of a text that are not those that encoding it would give."""
        draw, ids = random.Random(len(self.messages)), list[int]()
        names = sorted(self._added, key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
            if part in self._added:
                ids.append(self._vocabulary[part])
                continue
            letters, at = "".join(LETTERS[byte] for byte in part.encode()), 0
            while at < len(letters):
                sizes = range(1, min(12, len(letters) - at) + 1)
                known = [n for n in sizes if letters[at : at + n] in self._vocabulary]
                size = draw.choice(known)
                ids.append(self._vocabulary[letters[at : at + size]])
                at += size
        return ids


def measure(
    template: str,
    *,
    keeps: bool = True,
    thinks: bool = True,
    text: str = "",
    result: str = RESULT,
    **arguments: Any,
) -> Figures:
    """Have a conversation and return what it cost.

    Args:
        template: the chat template.
        keeps: whether answers are remembered.
        thinks: whether the model thinks before it writes.
        text: what it says before each call.
        result: of each call.
        arguments: for the template.
    """
    conversation = Conversation(template, keeps=keeps, **arguments)
    family = conversation.family
    end_of_call, end = ENDS.get(family.name, ("<|im_end|>",) * 2)
    num_calls = num_thoughts = 0
    for i in range(NUM_CALLS):
        call = family.writes.replace("{name}", "get_weather")
        call = call.replace("{arguments}", ARGUMENTS[family.style] % i).replace(":0<", f":{i}<")
        call = text + family.around[0] + call + family.around[1]
        reply = conversation.answer(f"Turn {i}." * thinks, call, end_of_call)
        num_calls, num_thoughts = num_calls + len(reply.calls), num_thoughts + bool(reply.thoughts)
        for told in conversation.messages[-1].get("tool_calls", ()):
            message = {"role": "tool", "tool_call_id": told["id"], "content": [result]}
            conversation.messages.append(message)
    conversation.answer("Done." * thinks, f"{family.answers}It is cold, and   it rains.", end)
    conversation.messages.append({"role": "user", "content": ["And tomorrow?"]})
    conversation.answer("", f"{family.answers}Warm.", end)
    return Figures(conversation.beyond, num_calls, num_thoughts)


def main(arguments: Sequence[str]) -> None:
    """Print the figures of each template in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--argument", action="append", default=[])
    options = parser.parse_args(arguments)
    given = {it.partition("=")[0]: json.loads(it.partition("=")[2]) for it in options.argument}
    rows = []
    for path in sorted(options.folder.glob("*.jinja")):
        template = path.read_text("utf-8")
        family = detect(template)
        if family is None or not family.writes:
            continue
        for thinks in (True, False):
            for keeps in (True, False):
                row: dict[str, Any] = {"template": path.stem, "family": family.name}
                row |= {"thinks": thinks, "remembered": keeps}
                try:
                    row |= measure(template, keeps=keeps, thinks=thinks, **given)._asdict()
                except RequestError as error:
                    row["error"] = str(error)
                rows.append(row)
                print(*row.values(), sep="\t")  # noqa: T201
    print(json.dumps(rows))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
