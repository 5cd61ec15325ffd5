"""Writes the reference of the command line, which is what each command's `--help` prints."""

from collections.abc import Iterator
from typing import Any

import click

from tieredkv.cli.main import CONTEXT, cli

_HEAD = """\
# Command line
What `--help` prints for each command. `make reference` writes this file, and a test compares it
with the commands."""
_SETTINGS: dict[str, Any] = {**CONTEXT, "terminal_width": 100, "max_content_width": 100}


def reference() -> str:
    """Return the help of all commands as Markdown."""
    parts = [_HEAD]
    for context in _contexts(click.Context(cli, info_name="tieredkv", **_SETTINGS)):
        parts.append(f"## {context.command_path}\n```\n{context.get_help()}\n```")
    return "\n\n".join(parts) + "\n"


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command, and those of the commands below it in the order of help."""
    yield context
    if isinstance(group := context.command, click.Group):
        for name in group.list_commands(context):
            command = group.commands[name]
            yield from _contexts(
                click.Context(command, parent=context, info_name=name, **_SETTINGS)
            )


if __name__ == "__main__":
    click.echo(reference(), nl=False)
