"""The engine asks the cache, and never a part of it."""

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1] / "engine"
BUILDS = "parts.py"  # which makes the parts of the cache and joins them
FACADES = {"cache", "_cache", "operations", "_operations"}
"""What the engine calls its `TieredCache` and its `Operations`."""


def parts_asked(source: str) -> list[str]:
    """Return each attribute of an attribute of a facade that some code uses."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(inner := node.value, ast.Attribute)
        and _name(inner.value) in FACADES
    ]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def test_the_engine_uses_no_attribute_of_an_attribute_of_a_facade() -> None:
    asked = {
        path.name: found
        for path in sorted(ENGINE.glob("*.py"))
        if path.name != BUILDS and (found := parts_asked(path.read_text()))
    }
    assert asked == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("self.cache.room.is_coming(prefix)", ["self.cache.room.is_coming"]),
        ("cache.room.state", ["cache.room.state"]),
        ("self._scheduler.cache.plan.split", ["self._scheduler.cache.plan.split"]),
        ("self.cache.admit(prefix)", []),
        ("disk = self.cache.disk\ndisk.pid", []),
    ],
)
def test_such_uses_are_found(code: str, found: list[str]) -> None:
    assert parts_asked(code) == found
