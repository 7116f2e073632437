"""The documentation names things that exist: pages, anchors, files, modules, commands, fields."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, RootModel

from paceline import cli, policies
from paceline_backend.api import (
    admin,
    alerts,
    audit,
    compare,
    details,
    engines,
    evidence,
    export,
    fleet,
    forecasts,
    history,
    live,
    logs,
    models,
    monitoring,
    nodes,
    quality,
    report,
    run_nodes,
    runs,
    switching,
    telemetry,
    tokens,
)
from paceline_backend.server import tracing

ROOT = Path(__file__).parents[2]

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_FILE = re.compile(
    r"(?<![\w/.])(?:agent|backend|dashboard|docs|examples|benchmarks|migrations|tests)/[\w./-]+"
)
# In backticks: a file of code or a folder, by its path or the end of its path.
_SHORT = re.compile(r"`((?:[\w-]+/)*[\w.-]*\w\.(?:py|js|ts|css)|(?:[\w-]+/)+)(?:::\w+)?`")
_PYTHON = re.compile(r"^```py(?:thon)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^ *from (paceline[\w.]*) import (?:\(([^)]*)\)|([^(\n]+))", re.MULTILINE)
_MODULE = re.compile(r"\bpaceline(?:_backend|_dashboard)?(?:\.\w+)+")
_COMMAND = re.compile(r"(?:^|[`/;(] ?)paceline ([a-z]+)", re.MULTILINE)
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_PATH = re.compile(r"`(?:GET|POST|PUT|DELETE) (/[^\s`?]*)")


def _pages() -> list[Path]:
    folders = ("docs", "examples")
    return sorted([*ROOT.glob("*.md"), *(p for f in folders for p in (ROOT / f).rglob("*.md"))])


PAGES = pytest.mark.parametrize(
    "page", _pages(), ids=lambda page: page.relative_to(ROOT).as_posix()
)


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        kept = (c for c in text if c in "-_ " or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        number = 1
        anchor = slug
        while anchor in anchors:
            anchor, number = f"{slug}-{number}", number + 1
        anchors.add(anchor)
    return anchors


@PAGES
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in _anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", ["security.md", "promises.md"])
def test_tests_that_hold_a_promise_exist(page: str) -> None:
    named = _TEST.findall((ROOT / "docs" / page).read_text())
    assert len(named) >= 15
    for file, test in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert f"def {test}(" in path.read_text(), f"{path} has no {test}"


@PAGES
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # tells of what was
        return
    text = page.read_text()
    for name in _FILE.findall(text):
        name = name.rstrip("./")
        if name in _MADE or any(part in name for part in ("*", "…")):
            continue
        assert (ROOT / name).exists(), f"{name} does not exist"


_MADE = (  # by readers: of read-the-code.md, and with a GPU
    "agent/paceline/policies/presets/lpt.py",
    "tests/unit/policies/presets/test_lpt.py",
    "benchmarks/results/gpu.json",
)


# Files and folders that are not in the repository: of read-the-code.md and tutorial.md, whose
# readers make them, and of a run's directory on its node.
_NOT_HERE = {*_MADE, "paced.py", "spool/", "checkpoints/"}
_FOLDERS = (
    *("agent", "backend", "benchmarks", "dashboard", "docker", "docs", "examples", "migrations"),
    *("scripts", "tests"),
)


@cache
def _endings() -> frozenset[str]:
    """The ends of all paths, from a bare name to the whole path. Folders end with a slash."""
    endings: set[str] = set()
    for top in _FOLDERS:
        for path in ((ROOT / top), *(ROOT / top).rglob("*")):
            if "__pycache__" in path.parts:
                continue
            parts, slash = path.relative_to(ROOT).parts, "/" if path.is_dir() else ""
            endings |= {"/".join(parts[at:]) + slash for at in range(len(parts))}
    return frozenset(endings)


@PAGES
def test_short_names_of_files_are_ends_of_paths(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    for name in _SHORT.findall(_FENCE.sub("", page.read_text())):
        assert name in _endings() or name in _NOT_HERE, f"{name}: no file or folder"


@PAGES
def test_imports_in_code_blocks_work(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    for code in _PYTHON.findall(page.read_text()):
        for module, several, one_line in _IMPORT.findall(code):
            names = re.sub(r"#.*| as \w+", "", several or one_line)
            for name in re.findall(r"\w+", names):
                assert _exists(f"{module}.{name}"), f"{module} has no {name}"


@PAGES
def test_modules_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    for name in _MODULE.findall(page.read_text()):
        if not name.startswith("paceline.org"):
            assert _exists(name), f"{name}: neither a module nor in one"


_ADAPTERS = ("accelerate", "lightning", "ray", "transformers")


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one, or a figure of OpenTelemetry's.

    Entry-point groups count.
    """
    if name in ("paceline.policies", "paceline.backends", "paceline.web", "paceline.commands"):
        return True
    if f'"{name}"' in inspect.getsource(tracing):
        return True
    parts = name.split(".")
    # Ray is in no environment of these tests, and to import other frameworks takes seconds.
    if len(parts) > 1 and parts[0] == "paceline" and parts[1] in _ADAPTERS:
        source = (ROOT / f"agent/paceline/{parts[1]}.py").read_text()
        return all(part in source for part in parts[2:])
    for length in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        if spec is None:
            continue
        target: object = importlib.import_module(".".join(parts[:length]))
        return all((target := getattr(target, part, None)) is not None for part in parts[length:])
    return False


@cache
def _commands() -> set[str]:
    """The subcommands of `paceline`, plugins' too."""
    app = typer.Typer()
    for entry in entry_points(group="paceline.commands"):
        entry.load()(app)
    groups = {str(g.name) for g in (*app.registered_groups, *cli.app.registered_groups)}
    return groups | {
        str(command.name or getattr(command.callback, "__name__", ""))
        for command in (*cli.app.registered_commands, *app.registered_commands)
    }


@PAGES
def test_commands_that_are_named_exist(page: Path) -> None:
    for code in _CODE.findall(page.read_text()):
        for name in _COMMAND.findall(code):
            assert name in _commands(), f"paceline {name}: no such command"


RESOURCES = (
    *(admin, runs, run_nodes, switching, quality, engines, telemetry, report, live, evidence),
    *(forecasts, history, compare, details, export, alerts, fleet, audit, nodes, logs, tokens),
)


def _fields() -> Iterator[tuple[str, str]]:
    for module in (models, *RESOURCES, monitoring):
        for made in vars(module).values():
            if isinstance(made, type) and issubclass(made, BaseModel):
                for name, field in made.model_fields.items():
                    if not issubclass(made, RootModel):
                        yield made.__name__, field.alias or name


def test_rest_has_every_field() -> None:
    text = (ROOT / "docs/rest.md").read_text()
    words = set(re.findall(r"\w+", text))
    for model, name in _fields():
        stem = re.sub(r"_(min|max)$", "", name)
        assert name in words or stem in words, f"docs/rest.md: {name} of {model} is missing"


def _routers() -> Iterator[APIRouter]:
    for module in RESOURCES:
        yield from (value for value in vars(module).values() if isinstance(value, APIRouter))


def test_rest_has_every_call() -> None:
    text = (ROOT / "docs/rest.md").read_text()
    documented = {re.sub(r"\{\w+\}", "{}", path) for path in _PATH.findall(text)}
    for router in _routers():
        for route in router.routes:
            assert isinstance(route, APIRoute)
            path = re.sub(r"\{\w+\}", "{}", route.path)
            assert path in documented, f"docs/rest.md: {route.path} is missing"


def test_every_registered_preset_is_described() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    headed = {
        name for heading in _HEADING.findall(text) for name in re.findall(r"`(\S+)`", heading)
    }
    assert set(policies.names()) <= headed
