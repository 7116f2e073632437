#!/usr/bin/env bash
# Makes .venv from the pinned constraints. Run again, it does nothing unless something changed.
#
#   scripts/setup.sh demo   the packages of `make demo`
#   scripts/setup.sh dev    these, plus the packages of `make test`, a Chromium, Node's tools and Slurm
#   scripts/setup.sh bench  the packages that benchmarks/ compares with
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?usage: scripts/setup.sh demo|dev|bench}
python=${PYTHON:-python3}
say() { printf '\033[2m%s\033[0m\n' "$*" >&2; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo -n "$@"; else return 1; fi; }

"$python" - <<'PY' || { echo "Paceline needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

if [ ! -x .venv/bin/pip ]; then
    say "making .venv"
    rm -rf .venv
    if ! "$python" -m venv .venv 2>/dev/null; then
        # On Debian and Ubuntu, venv's pip is in a separate package.
        say "installing python3-venv"
        as_root apt-get update -qq && as_root apt-get install -y -qq python3-venv >/dev/null ||
            { echo "python3 -m venv failed; install your system's python3-venv package" >&2; exit 1; }
        rm -rf .venv && "$python" -m venv .venv
    fi
fi

pins=(pyproject.toml constraints.txt "$0")
want="$extra $(cat "${pins[@]}" | sha256sum)"
stamp=.venv/.paceline-$extra
pip=(.venv/bin/pip --disable-pip-version-check -q)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    say "installing paceline[$extra] (the first time takes a minute or two)"
    if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        # Use the CPU build: demo and tests need no GPU, and PyPI's build has gigabytes of CUDA.
        # TORCH_INDEX=https://pypi.org/simple installs PyPI's build.
        index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
        if "$python" -c "import sys, urllib.request as u; u.urlopen(sys.argv[1] + '/torch/', timeout=5)" "$index" 2>/dev/null; then
            # --no-deps: the index has few versions of torch's dependencies; PyPI's follow below.
            "${pip[@]}" install --no-deps --index-url "$index" -c constraints.txt torch
        fi
    fi
    "${pip[@]}" install -c constraints.txt -e ".[$extra]"
    if [ "$extra" != demo ]; then
        # --no-deps: benchmark and tests use one module, without verl's dependencies (an RL stack).
        "${pip[@]}" install --no-deps -c constraints.txt verl
    fi
    if [ "$extra" = bench ]; then
        # --no-deps: it asks for an older protobuf than others, and its solver runs with theirs.
        "${pip[@]}" install --no-deps -c constraints.txt ortools
    fi
    # Otherwise the first servers compile them: no plan comes for ten seconds, or minutes on a busy machine.
    say "compiling the policies' kernels"
    .venv/bin/python -c 'from paceline import policies; policies.warm_up()'
    echo "$want" > "$stamp"
fi

# A nightly build, which its index may drop; the next setup tries again.
stamp=.venv/.paceline-torchft
if [ "$extra" = dev ] && [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    say "installing torchft"
    if "${pip[@]}" install --retries 1 -c constraints.txt -e ".[torchft]"; then
        echo "$want" > "$stamp"
    else
        say "torchft could not be installed: its tests on a real one are skipped"
    fi
fi

if [ "$extra" = dev ] && ! .venv/bin/python scripts/find_chromium.py >/dev/null 2>&1; then
    say "installing Chromium for the browser tests"
    { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } ||
        .venv/bin/python -m playwright install chromium ||
        { echo "no Chromium found; install one (apt-get install chromium) or set PACELINE_CHROMIUM" >&2; exit 1; }
fi

if [ "$extra" = dev ] && [ "$(id -u)" = 0 ] && ! command -v slurmctld >/dev/null; then
    # The tests of Slurm need root, too, and are skipped without it.
    say "installing Slurm for the tests on a real one"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null; } ||
        say "Slurm could not be installed: its tests are skipped"
fi

if [ "$extra" = dev ]; then
    recent_node() { command -v npm >/dev/null && node -e 'process.exitCode = process.versions.node.split(".")[0] < 18 ? 1 : 0' 2>/dev/null; }
    if ! recent_node; then
        say "installing Node.js for the checks of the dashboard's modules"
        { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq nodejs npm >/dev/null; } || true
        recent_node || { echo "the checks need Node.js 18 or newer, with npm; install it (https://nodejs.org)" >&2; exit 1; }
    fi
    want=$(cat package.json package-lock.json | sha256sum)
    stamp=node_modules/.paceline
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        # `npm ci` begins by deleting node_modules, so tools that are there already stay without it.
        if ! npm ls >/dev/null 2>&1; then
            say "installing the tools of package.json into node_modules"
            problem=$(npm ci --no-audit --no-fund --loglevel=error --fetch-retries=1 2>&1 >/dev/null) || {
                echo "npm cannot install the tools of package.json ($(grep -m1 -o 'code .*' <<<"$problem" || echo "see npm ci")):" \
                    "run 'make setup-dev' with a network, or copy node_modules from a checkout that has them" >&2
                exit 1
            }
        fi
        echo "$want" > "$stamp"
    fi
fi
