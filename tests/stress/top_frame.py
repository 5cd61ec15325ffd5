"""Draws what `tieredkv top` shows of a running server as an SVG, as docs/top.svg was made.

    TIEREDKV_ADMIN_KEY=... python -m tests.stress.top_frame --url URL --out docs/top.svg

Figures and layout are those of the command. The file loads no font from elsewhere: a viewer takes
its own monospaced one.
"""

import io
import re
import time
from pathlib import Path

import click
from rich.console import Console

from tieredkv.cli.top import DEFAULT_URL, ServerSource
from tieredkv.cli.top_figures import picture_of
from tieredkv.cli.top_picture import draw

FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@click.command(help=__doc__)
@click.option("--url", default=DEFAULT_URL, help="URL of the server, without /v1.")
@click.option("--admin-key", envvar="TIEREDKV_ADMIN_KEY", help="Key of the server, if it has one.")
@click.option("--span", "span_s", type=float, default=2.0, help="Seconds to measure moves over.")
@click.option("--columns", type=int, default=80, help="Width of the terminal.")
@click.option("--lines", type=int, default=40, help="Height of the terminal.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(
    url: str, admin_key: str | None, span_s: float, columns: int, lines: int, out: Path
) -> None:
    source = ServerSource(url, admin_key)
    before = source.read()
    time.sleep(span_s)
    console = Console(record=True, file=io.StringIO(), width=columns)
    console.print(draw(picture_of(url, before, source.read()), console, height=lines))
    console.print()  # the frame of the SVG cuts the lowest pixels of its last line
    svg = FONT_FACE.sub("", console.export_svg(title="tieredkv top"))
    out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
