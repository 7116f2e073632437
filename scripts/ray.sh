#!/usr/bin/env bash
# Makes .venv-ray, a real Ray for the tests of runs on Ray (`make test-engines`). Run again, it does
# nothing. Ray's packages are in no other environment: the server needs none of them.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2.60.0 # of the Ray that the tests start

stamp=.venv-ray/.paceline
want="$version $(readlink -f .venv)"
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0
printf '\033[2m%s\033[0m\n' "installing Ray $version for the tests on a real one (two minutes)" >&2
rm -rf .venv-ray
if .venv/bin/python -m venv .venv-ray && .venv-ray/bin/pip --disable-pip-version-check -q install "ray[default]==$version"; then
    # Below Ray's own packages: those of .venv, torch and ours among them.
    place() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    echo "import site; site.addsitedir('$(place .venv)')" >"$(place .venv-ray)/zz-paceline.pth"
    echo "$want" >"$stamp"
else
    rm -rf .venv-ray
    echo "Ray could not be installed: its tests are skipped" >&2
fi
