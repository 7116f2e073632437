"""Hooks of MkDocs: pages that are made from other files than those in docs/.

- README, CHANGELOG and CONTRIBUTING are pages;
- so is each file and folder outside of docs/ that a page links to: its text, or its list of files;
- the reference is made from the code: the command line's by Typer, REST's from its OpenAPI
  document, the library's by mkdocstrings.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LIBRARY = (
    "paceline.Session",
    "paceline.Batch",
    "paceline.Shapes",
    "paceline.packed",
    "paceline.Packed",
    "paceline.generator",
    "paceline.numpy_generator",
    "paceline.seeded",
    "paceline.PacelineError",
    "paceline.accelerate",
    "paceline.transformers",
    "paceline.lightning",
    "paceline.ray",
    "paceline.data",
    "paceline.connect",
    "paceline.client",
)
POLICIES = ("paceline.policies.base", "paceline.policies.values")

_LINK = re.compile(
    r"(?P<before>\]\(|\b(?:src|srcset|href)=\")(?P<path>[^)\s\"#:]+)(?P<rest>[#)\"])"
)
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_origins: dict[str, str] = {}  # page → file or folder that it is made from, below the root


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    _origins.clear()
    made: dict[str, Callable[[], str]] = {
        "reference/library.md": partial(_documented, "The library", LIBRARY),
        "reference/policies.md": partial(_documented, "What policies are made of", POLICIES),
        "reference/command-line.md": _command_line,
        "reference/rest.md": _rest,
    }
    for uri, write in made.items():
        files.append(File.generated(config, uri, content=write()))
    icon = ROOT / "dashboard/paceline_dashboard/assets/icon.svg"
    files.append(File.generated(config, "icon.svg", content=icon.read_text()))
    for file in files.documentation_pages():
        if file.src_uri not in made:
            _origins[file.src_uri] = f"docs/{file.src_uri}"
    waiting = deque([*_origins.values(), *PAGES])
    while waiting:
        path = waiting.popleft()
        uri = _uri(path)
        if uri not in _origins:
            _origins[uri] = path
            files.append(File.generated(config, uri, content=_text(path)))
        waiting += [each for each in _targets(path) if _uri(each) not in _origins]
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Points links to where the site has what they mean."""
    uri = page.file.src_uri  # type: ignore[attr-defined]
    if (origin := _origins.get(uri)) is None:
        return markdown

    def pointed(link: re.Match[str]) -> str:
        target = _meant(origin, link["path"])
        if target is None:
            return link[0]
        return (
            link["before"] + posixpath.relpath(_uri(target), posixpath.dirname(uri)) + link["rest"]
        )

    parts = _FENCED.split(markdown)
    return "".join(part if at % 2 else _LINK.sub(pointed, part) for at, part in enumerate(parts))


class Colons(griffe.Extension):
    """Ends the line before an example with one colon; docstrings have two there."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)


def _targets(origin: str) -> list[str]:
    """Files and folders outside of docs/ that a page links to, below the root."""
    if not _is_text(origin):
        return []
    links = _LINK.finditer(_FENCED.sub("", _text(origin)))
    meant = [_meant(origin, link["path"]) for link in links]
    return [path for path in meant if path is not None and not path.startswith("docs/")]


def _meant(origin: str, link: str) -> str | None:
    """Return the target of a link, relative to the root; None: it does not exist here."""
    folder = origin if (ROOT / origin).is_dir() else posixpath.dirname(origin)
    path = posixpath.normpath(posixpath.join(folder, link))
    return None if path.startswith("..") or not (ROOT / path).exists() else path


def _uri(path: str) -> str:
    """Return the site's page of a file or folder."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def _is_text(path: str) -> bool:
    return (ROOT / path).is_dir() or path.endswith(".md")


def _text(path: str) -> str:
    """Return a page's Markdown: of a folder, its README and its files; of a file, its text."""
    here = ROOT / path
    if here.is_dir():
        listed = ["git", "ls-files", "--", "."]
        names = subprocess.run(listed, cwd=here, capture_output=True, text=True, check=True).stdout
        readme = here / "README.md"
        head = readme.read_text() if readme.exists() else f"# {path}\n"
        rest = [name for name in names.splitlines() if name != "README.md"]
        return head + "\n## Files\n\n" + "".join(f"- [{name}]({name})\n" for name in rest)
    text = here.read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{here.suffix.removeprefix('.')}\n{text}\n````\n"


def _documented(title: str, names: tuple[str, ...]) -> str:
    return f"# {title}\n\n" + "".join(f"::: {name}\n\n" for name in names)


def _command_line() -> str:
    from typer.cli import get_docs_for_click

    from paceline.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="paceline")
    return get_docs_for_click(obj=command, ctx=context, name="paceline", title="Command line")


def _rest() -> str:
    from openapidocs.mk.v3 import OpenAPIV3DocumentationHandler

    from paceline_backend.api.app import create_app
    from paceline_backend.server.settings import Settings
    from paceline_backend.store import Store

    with TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/paceline.db"
        with Store.open(database) as store:
            app = create_app(store, Settings(database, "redis://127.0.0.1"))  # which is not run
            document = app.openapi()
    return str(OpenAPIV3DocumentationHandler(document).write())
