#!/usr/bin/env bash
# Downloads the speech prompts, about 98 MB, and unpacks them into DIR. Installs nothing and needs no root.
# Does nothing when DIR already has them.
#
#   examples/speech/fetch.sh [DIR]      DIR is ~/.cache/paceline/speech by default
set -euo pipefail
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/paceline/speech}
packages=()
for language in en es fr it ru; do packages+=("asterisk-core-sounds-$language-wav"); done
[ ! -e "$dir/sounds" ] || exit 0

for tool in apt-get dpkg-deb; do
    command -v $tool >/dev/null || {
        echo "the speech prompts come from Debian's packages, but this system has no $tool." \
            "On a Debian or Ubuntu machine run examples/speech/fetch.sh and copy the folder $dir from there," \
            "or unpack these packages of packages.debian.org into $dir/sounds: ${packages[*]}" >&2
        exit 1
    }
done

mkdir -p "$dir"
work=$(mktemp -d "$dir/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
# Package lists of the system may be missing or out of date. Then lists of our own are fetched, which needs no root.
mkdir -p lists/partial cache/archives/partial
own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User=)
echo "fetching the speech prompts into $dir (98 MB)" >&2
if ! apt-get -qq -o APT::Sandbox::User= download "${packages[@]}" 2>/dev/null; then
    { apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download "${packages[@]}"; } >&2 || {
        echo "apt-get could not download ${packages[*]}." \
            "Check that this machine reaches a Debian mirror, or on Ubuntu that 'universe' is enabled." >&2
        exit 1
    }
fi
for package in *.deb; do dpkg-deb -x "$package" unpacked; done
mv unpacked "$dir/sounds"
