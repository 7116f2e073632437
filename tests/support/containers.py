"""Containers of the project's images without a container engine: mount namespaces, as root.

`Image` follows a Dockerfile: it has a root of its own on top of this machine's, in which the wheel
is installed where the Dockerfile installs the checkout, and in which its other `RUN` instructions
run. `Image.start` then starts a command as an engine does: as the image's user, without
capabilities, on a root that can only be read but for the volumes given.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
# That of an engine. Tests before may have called `private.files`, after which only root could read
# what an image has.
_UMASK = 0o022
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The image's layer lies on a file system of the namespace's own, which ends with the namespace.
_BUILD = """
mount -t tmpfs layers "$0" && cd "$0" && mkdir upper work root
mount -t overlay image -o lowerdir=/,upperdir=upper,workdir=work root
for part in proc sys dev; do mount --rbind /$part root/$part; done
echo ready && read -r _
"""
_RUN = """
mount -t overlay image -o ro,lowerdir="$0"/upper:/ "$0"/root
cd "$0"/root && for part in proc sys dev; do mount --rbind /$part $part; done
while [ "$1" != -- ]; do mount $3 "$1" "./$2"; shift 3; done
shift && exec "$@"
"""


@dataclass
class Dockerfile:
    """Instructions of a Dockerfile that matter to a container, of all stages together."""

    path: Path
    runs: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    user: str = "0"
    folder: str = "/"
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = re.sub(r"\\\n", "", self.path.read_text())
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            match word:
                case "FROM":
                    self.environment = {"PATH": _PATH}
                case "RUN":
                    self.runs.append(rest)
                case "ENV":
                    for name, value in (pair.split("=", 1) for pair in shlex.split(rest)):
                        self.environment[name] = value.replace("$PATH", self.environment["PATH"])
                case "USER":
                    self.user = rest
                case "WORKDIR":
                    self.folder = rest
                case "ENTRYPOINT":
                    self.entry = json.loads(rest)
                case "CMD":
                    self.command = json.loads(rest)
                case "HEALTHCHECK":
                    self.healthcheck = json.loads(rest[rest.index("[") :])


@dataclass(frozen=True)
class Volume:
    """A folder of a container that can be written: an empty file system, or a folder outside."""

    source: Path | None
    options: str = ""

    def words(self, target: str) -> list[str]:
        if self.source is None:
            return ["tmpfs", target, f"-t tmpfs -o {self.options}"]
        return [str(self.source), target, "--bind"]


class Image:
    """An image of this checkout; a context manager.

    Args:
        dockerfile: in `docker/`, without its ending.
    """

    def __init__(self, dockerfile: str, folder: Path, wheel: Path) -> None:
        self.file = Dockerfile(ROOT / "docker" / f"{dockerfile}.Dockerfile")
        self._folder = folder
        self._wheel = wheel

    def __enter__(self) -> Image:
        self._folder.mkdir()
        build = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _BUILD]
        self._namespace = subprocess.Popen(
            [*build, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            umask=_UMASK,
        )
        assert self._namespace.stdout is not None
        assert self._namespace.stdout.readline() == "ready\n"
        self._open_ways()
        installed = False
        environment: dict[str, str] = {"HOME": "/root", **self.file.environment}
        for instruction in self.file.runs:
            if installs := re.search(r'pip install .*?"?\.(?:\[(\w+)\])?"?$', instruction):
                self._install(installs[1] or "")
                installed = True
            elif "pip install" not in instruction:
                self._inside(["sh", "-ec", instruction], environment)
        assert installed, f"{self.file.path} does not install the checkout"
        self._nsenter(["umount", "--recursive", str(self._folder / "root")])
        return self

    def __exit__(self, *_: object) -> None:
        self._namespace.communicate("\n")

    def _open_ways(self) -> None:
        """Let every user pass to what the environment links to: the tests' packages and Python."""
        for path in {ROOT, Path(sys.prefix), Path(sys.base_prefix)}:
            for parent in path.parents:
                if not parent.stat().st_mode & 0o001:
                    self._inside(["chmod", "a+x", str(parent)], {"PATH": _PATH})

    def _install(self, extra: str) -> None:
        environment = {"PATH": _PATH, "PYTHONPATH": str(ROOT / "tests"), "HOME": "/root"}
        words = ["-m", "support.wheels", "/opt/paceline", str(self._wheel), extra]
        self._inside([sys.executable, *words], environment)

    def _inside(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._nsenter(["chroot", str(self._folder / "root"), *command], environment)

    def _nsenter(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        words = ["nsenter", "--mount", "--target", str(self._namespace.pid), *command]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, umask=_UMASK
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        volumes: Mapping[str, Volume],
        log: IO[bytes],
        *,
        groups: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a command in a container.

        Args:
            volumes: by where they are in the container; each folder must be one of the image.
        """
        mounts = [word for target, each in volumes.items() for word in each.words(target)]
        identity = [f"--reuid={self.file.user}", f"--regid={self.file.user}"]
        identity += [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
        rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        go = ["sh", "-ec", 'cd "$0" && exec "$@"', self.file.folder, *command]
        return subprocess.Popen(
            [
                *("nsenter", "--mount", "--target", str(self._namespace.pid)),
                *("unshare", "--mount", "--propagation", "private"),
                *("sh", "-ec", _RUN, str(self._folder), *mounts, "--", "chroot", "."),
                *("setpriv", *identity, *rights, "--", *go),
            ],
            env={"HOME": "/home/paceline", **self.file.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            umask=_UMASK,
        )


def volume_of(folder: Path, owner: int, group: int, mode: int) -> Volume:
    """Make a folder outside, as an engine makes a volume."""
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, owner, group)
    folder.chmod(mode)
    return Volume(folder)
