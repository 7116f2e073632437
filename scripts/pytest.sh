#!/usr/bin/env bash
# Runs pytest. Up to eight tests that fail beside others run once more, alone and one by one: a
# machine with two cores starves a test now and then. The end names each that passed only then.
set -u
cd "$(dirname "$0")/.."
most=8
.venv/bin/pytest "$@"
code=$?
[ "$code" = 1 ] || exit "$code"
failed=$(.venv/bin/python -c 'import json
print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")') || exit 1
[ "$(wc -l <<<"$failed")" -le "$most" ] || exit 1
printf '\nThese tests run once more, alone:\n%s\n\n' "$failed"
.venv/bin/pytest --last-failed --last-failed-no-failures none --numprocesses 0 || exit 1
printf '\nFLAKY: failed beside others, passed alone. Each is a defect to be mended:\n%s\n' "$failed"
