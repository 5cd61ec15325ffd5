"""The tools of `notes.py` for `llm --functions`, which takes a file."""

from pathlib import Path


def read_note(title: str) -> str:
    """Read a note."""
    return Path(f"{title}.txt").read_text()


def write_note(title: str, text: str) -> str:
    """Write a note."""
    Path(f"{title}.txt").write_text(text)
    return "It is written."
