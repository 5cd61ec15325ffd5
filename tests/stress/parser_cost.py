"""Measures what taking messages apart costs, per token, for each family of models and length.

    python -m tests.stress.parser_cost

A message has thoughts, text and calls of tools, a third of its tokens each, as the family writes
them, or is a call where that is all that a message may be. A token has four characters and is fed
by itself, as the server does. The last call must come out as it was written. `plain` is text in
which nothing is marked, and `teasing` is text that is full of beginnings of marks.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from tieredkv.bench import raw
from tieredkv.server.message_parser import Delta, Family, MessageParser, families

TOKEN_CHARACTERS = 4
KINDS = ("message", "plain", "teasing")
TOOL = {"name": "run", "parameters": {"type": "object", "properties": {"text": {}}}}
TOOLS = [{"type": "function", "function": TOOL}]
WRITTEN: dict[str, Callable[[dict[str, str]], str]] = {
    "json": json.dumps,
    "gemma": lambda given: f'{{text:<|"|>{given["text"]}<|"|>}}',
    "qwen_xml": lambda given: f"<parameter=text>\n{given['text']}\n</parameter>",
    "minimax_xml": lambda given: f'<parameter name="text">{given["text"]}</parameter>',
    "glm_xml": lambda given: f"<arg_key>text</arg_key><arg_value>{given['text']}</arg_value>",
}
PROSE = "It looks at the file, and then it says what is wrong with the second line of it. "
CALLED = "a text of twenty words or so, as a command of a shell has, or a short piece of a file "
TEASING = "a < b, <| and [ and { and <tool, <thin and <tool_cal and functions "

Row = dict[str, Any]


def filled(text: str, num_characters: float) -> str:
    return (text * (1 + int(num_characters) // len(text)))[: int(num_characters)].strip()


def message(family: Family, num_tokens: int) -> str:
    """Return a message of about so many tokens, of which calls are the last third."""
    part = num_tokens * TOKEN_CHARACTERS / 3
    opening, closing = family.thinks or ("", "")
    text = opening + filled(PROSE, part) + closing + family.answers + filled(PROSE, part)
    if family.is_bare:  # a call is the whole message
        text = ""
    arguments = WRITTEN[family.style]({"text": CALLED.strip()})
    call = family.writes.replace("{name}", "run").replace("{arguments}", arguments)
    num_calls = 1 if family.between is None else max(1, round(part / len(call)))
    calls = (family.between or "").join([call] * num_calls)
    return text + family.around[0] + calls + family.around[1]


def parsed(family: Family, text: str) -> Iterator[Delta]:
    parser = MessageParser(family, family.start, TOOLS)
    for at in range(0, len(text), TOKEN_CHARACTERS):
        yield from parser.feed(text[at : at + TOKEN_CHARACTERS])
    yield from parser.finish()


def measure(family: Family, kind: str, num_tokens: int, repeats: int) -> Row:
    """Measure one kind of text, and check what came out of it."""
    texts = {"plain": PROSE, "teasing": TEASING}
    num_characters = num_tokens * TOKEN_CHARACTERS
    text = filled(texts[kind], num_characters) if kind in texts else message(family, num_tokens)
    seconds = []
    for _ in range(repeats):
        began_at = time.perf_counter()
        deltas = [*parsed(family, text)]
        seconds.append(time.perf_counter() - began_at)
    calls = [delta.call for delta in deltas if delta.call is not None]
    if kind == "message":
        assert calls and calls[-1].name == "run", f"{family.name}: no call came out"
        assert json.loads(calls[-1].arguments) == {"text": CALLED.strip()}
    else:
        assert "".join(delta.text + delta.thoughts for delta in deltas) == text and not calls
    num_fed = -(-len(text) // TOKEN_CHARACTERS)
    us = 1e6 * statistics.median(seconds) / num_fed
    return {"family": family.name, "text": kind, "tokens": num_fed, "us_per_token": us}


@click.command(help=__doc__)
@click.option("--tokens", default="300,3000,30000", show_default=True, help="With commas.")
@click.option("--repeats", default=3, show_default=True, help="The median is reported.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(tokens: str, repeats: int, commit: str | None) -> None:
    rows = [
        measure(family, kind, int(count), repeats)
        for family in families().values()
        if family.call
        for kind in KINDS
        for count in tokens.split(",")
    ]
    report = raw.head(commit, "python -m tests.stress.parser_cost")
    click.echo(json.dumps(report | {"rows": rows}))


if __name__ == "__main__":
    main()
