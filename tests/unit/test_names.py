"""Names are nouns: a reader learns from a name what it holds."""

from __future__ import annotations

import ast
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
FOLDERS = ("agent", "backend", "dashboard", "tests", "benchmarks", "examples", "scripts")
PRONOUNS = {"one", "found", "told"}


def _bound(node: ast.AST) -> set[str]:
    """The names that this node binds. It may read another's, as SQLAlchemy's `.one()`."""
    if isinstance(node, ast.keyword) or isinstance(getattr(node, "ctx", None), ast.Load):
        return set()
    names = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname"))
    return {name.strip("_") for name in names if isinstance(name, str)}


def _names(code: CodeType) -> set[str]:
    """All names that code binds or reads."""
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= {constant.co_name} | _names(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            names.update(name for name in constant if isinstance(name, str))
    return {name.strip("_") for name in names}


def test_no_name_is_a_pronoun() -> None:
    pronouns = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}: {', '.join(names)}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if _names(compile(path.read_text(), str(path), "exec")) & PRONOUNS
        for node in ast.walk(ast.parse(path.read_text()))
        if (names := _bound(node) & PRONOUNS)
    ]
    assert not pronouns, "\n".join(pronouns)
