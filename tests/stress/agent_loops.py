"""How much of an agent's prompt is computed again, with the chat template of any model.

A loop of ten calls of a tool, an answer and a further question are rendered and encoded as the
server does it, with answers whose ids are not those that encoding their text would give, and with
white space and orders of keys that no template prints. No model runs. It tells the tokens that each
turn computes beyond the new ones: less than a block if the answer before was found, and all of the
answer if it was not. It also tells what the turn behind the loop computes if the server was started
again before it, so that blocks are found and answers are forgotten: where ids were drawn as above
(`restart`), and where the model wrote what its template prints of the answer, in the ids that
encoding gives (`restart_encoded`).

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

from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tieredkv.test_remembered import LETTERS, SPECIAL, Session, made_tokenizer, message_of
from tieredkv.errors import RequestError
from tieredkv.server.chat import Encoded, Tokenization
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
    "gemma": '{days:[%d,2],city:<|"|>Zürich<|"|>}',
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
    "gemma-4": ("<|tool_response>", "<turn|>"),
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
    r"|<\|\w{1,40}>|<\w{1,40}\|>|<\|\"\|>|\[/?[A-Z]+(?:_[A-Z]+)?\]|\]~!?b[\]\[]|\[e~\["
)
"""Finds the names of tokens in a chat template."""

_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the tokenizers of these families cut a text before it is encoded, but for details.

Source: cl100k_base of tiktoken.
"""


class Figures(NamedTuple):
    """What a conversation cost.

    Attributes:
        beyond: tokens that each turn after the first computed beyond the new ones: those after a
            call, the one after the last result, and the one after a further question.
        num_calls, num_thoughts: how many calls, and answers with thoughts, were told apart.
        num_loop: tokens of the loop, from the first answer to the last result.
    """

    beyond: list[int]
    num_calls: int
    num_thoughts: int
    num_loop: int


def tokenizer_of(template: str, family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has the tokens of a chat template.

    Those of DeepSeek are not special but for the first and the last, as in its checkpoints.
    """
    end = ENDS.get(family.name, ("<|im_end|>",) * 2)
    names = {*_TOKENS.findall(template), *end, "<s>"} - {"<think>", "</think>"}
    is_deepseek = family.name.startswith("deepseek")
    special = [it for it in sorted(names) if not is_deepseek or "sentence" in it]
    tokenizer = made_tokenizer(template, [*SPECIAL, *special])
    cuts = [
        pre_tokenizers.Split(_WORDS, "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    others = sorted({*names, "<think>", "</think>"} - {*special})
    tokenizer.add_tokens([AddedToken(it, normalized=False) for it in others])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", end[1]
    return tokenizer


class Conversation:
    """One conversation with a model that writes as a family does.

    Args:
        template: the chat template.
        keeps: whether answers are remembered.
        draws: whether the ids of answers are drawn; if not, the model writes what the template
            prints of them, in the ids that encoding gives.
        arguments: for the template.
    """

    def __init__(
        self, template: str, *, keeps: bool = True, draws: bool = True, **arguments: Any
    ) -> None:
        family = detect(template)
        assert family is not None, "the family of the template is not known"
        self.family, self._tokenizer = family, tokenizer_of(template, family)
        self._tokenization = Tokenization(
            self._tokenizer, family=family, template_arguments=arguments
        )
        self._size, self._draws = (1 << 24) if keeps else 0, draws
        self._session = Session(self._tokenization, self._size)
        self._vocabulary = self._tokenizer.get_vocab()
        self._added = {it.content for it in self._tokenizer.added_tokens_decoder.values()}
        self._blocks = set[tuple[int, ...]]()
        self._whole = list[int]()
        self.messages: list[Any] = [
            {"role": "system", "content": ["You help."]},
            {"role": "user", "content": ["What is the weather?"]},
        ]
        self.beyond = list[int]()
        self.num_tokens = list[int]()

    def restart(self) -> None:
        """Forget the answers, as a server that is started again does; blocks are still found."""
        self._session = Session(self._tokenization, self._size)

    def answer(self, thoughts: str, text: str, end: str) -> Reply:
        """Have the model write an answer, which becomes a part of the conversation."""
        encoded = self._session.encode(self.messages, TOOLS)
        prompt = encoded.token_ids
        ids = [*self._sampled(self._written(encoded.text, thoughts) + text), self._vocabulary[end]]
        if not self._draws:
            ids = self._printed(encoded, ids, end)
        cached = self.compute(encoded, ids)
        self.num_tokens.append(len(prompt))
        if self._whole:
            self.beyond.append(len(prompt) - cached - max(0, len(prompt) - len(self._whole)))
        reply = self._session.answer(encoded, ids, TOOLS)
        self._whole = [*prompt, *ids[:-1]]  # The last token of an answer is not computed.
        self.messages.append(self._message(reply))
        return reply

    def compute(self, encoded: Encoded, ids: Sequence[int]) -> int:
        """Compute a prompt and its answer; return how many tokens of the prompt were found."""
        prompt, cached = encoded.token_ids, 0
        while tuple(prompt[: cached + BLOCK]) in self._blocks and cached + BLOCK < len(prompt):
            cached += BLOCK
        whole = [*prompt, *ids[:-1]]
        ends = range(BLOCK, len(whole) + 1, BLOCK)
        self._blocks |= {tuple(whole[:end]) for end in ends}
        return cached

    def _message(self, reply: Reply) -> Any:
        """Return an answer as the conversation goes on with it."""
        message = message_of(reply)
        for call in message.get("tool_calls", ()):
            call["type"] = "function"
        return {**message, "content": [reply.content] * bool(reply.content)}

    def _printed(self, encoded: Encoded, ids: Sequence[int], end: str) -> list[int]:
        """Return the ids of what the template prints of an answer behind its prompt.

        If it prints the prompt in another way than before, they are those of the answer's own text.
        """
        session = Session(self._tokenization, 0)
        message = self._message(session.answer(encoded, ids, TOOLS))
        whole = session.encode([*self.messages, message], TOOLS, add_generation_prompt=False).text
        text, rest = self._tokenizer.decode([*ids[:-1]]), whole.removeprefix(encoded.text)
        if rest != whole:  # the token that ends a call may be the one that begins its result
            text = rest[: rest.rindex(end)] if end in rest else rest
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._vocabulary[end]]

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
        """Return ids of a text, by and large not those that encoding it would give."""
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
    draws: bool = True,
    restarts: bool = False,
    thinks: bool = True,
    text: str = "",
    result: str = RESULT,
    **arguments: Any,
) -> Figures:
    """Have a conversation and return what it cost.

    Args:
        template: the chat template.
        keeps: whether answers are remembered.
        draws: see `Conversation`.
        restarts: whether the server is started again before the turn behind the loop.
        thinks: whether the model thinks before it writes.
        text: what it says before each call.
        result: of each call.
        arguments: for the template.
    """
    conversation = Conversation(template, keeps=keeps, draws=draws, **arguments)
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
    if restarts:
        conversation.restart()
    conversation.answer("Done." * thinks, f"{family.answers}It is cold, and   it rains.", end)
    conversation.messages.append({"role": "user", "content": ["And tomorrow?"]})
    conversation.answer("", f"{family.answers}Warm.", end)
    num_loop = conversation.num_tokens[NUM_CALLS] - conversation.num_tokens[0]
    return Figures(conversation.beyond, num_calls, num_thoughts, num_loop)


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
                    for name, draws in (("restart", True), ("restart_encoded", False)):
                        how: Any = {"keeps": keeps, "thinks": thinks, "draws": draws, **given}
                        row[name] = measure(template, restarts=True, **how).beyond[NUM_CALLS - 1]
                except RequestError as error:
                    row["error"] = str(error)
                rows.append(row)
                print(*row.values(), sep="\t")  # noqa: T201
    print(json.dumps(rows))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
