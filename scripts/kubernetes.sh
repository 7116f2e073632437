#!/usr/bin/env bash
# Builds Kubernetes 1.20.2 from Debian's source package for the tests on a real one, as root. It takes six minutes, and
# half an hour on a busy machine; again, it does nothing. The binaries are in
# ${PACELINE_KUBERNETES_BIN:-~/.cache/paceline/kubernetes}.
set -euo pipefail
target=${PACELINE_KUBERNETES_BIN:-${XDG_CACHE_HOME:-$HOME/.cache}/paceline/kubernetes}
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl)
say() { printf '\033[2m%s\033[0m\n' "$*" >&2; }
[ "$(id -u)" = 0 ] || { echo "run it as root: it installs packages, and the tests need root, too" >&2; exit 1; }

missing=()
for program in "${programs[@]}" pause; do [ -x "$target/$program" ] || missing+=("$program"); done
needed=()
for package in etcd-server:etcd containerd:containerd runc:runc; do
    command -v "${package#*:}" >/dev/null || needed+=("${package%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then needed+=(dpkg-dev golang-go); fi
if [ ${#needed[@]} -gt 0 ]; then
    say "installing ${needed[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${needed[@]}" >/dev/null
fi
[ ${#missing[@]} -gt 0 ] || { say "Kubernetes is in $target"; exit 0; }

mkdir -p "$target"
work=${PACELINE_KUBERNETES_WORK:-$(mktemp -d "${TMPDIR:-/tmp}/paceline-kubernetes-XXXXXX")}
[ -n "${PACELINE_KUBERNETES_WORK:-}" ] || trap 'rm -rf "$work"' EXIT
source=$work/src/k8s.io/kubernetes
if [ ! -d "$source" ]; then
    say "fetching the source package of Debian 12"
    mkdir -p "$work/lists/partial" "${source%/*}"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb-src [signed-by=$keys] http://deb.debian.org/debian bookworm main" > "$work/sources.list"
    options=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists")
    apt-get "${options[@]}" update -qq
    (cd "$work" && apt-get "${options[@]}" source -qq --download-only kubernetes && dpkg-source -x kubernetes_*.dsc "$source" >/dev/null)
fi

export GOPATH=$work GOCACHE=$work/cache GO111MODULE=off CGO_ENABLED=0 GOTOOLCHAIN=local
cd "$source"
if [ ! -e pkg/generated/openapi/zz_generated.openapi.go ]; then
    say "generating what the API server says of its own types"
    go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    parts=$(find staging/src/k8s.io -mindepth 1 -maxdepth 1 ! -name 'code-generator' ! -name 'sample-*')
    # shellcheck disable=SC2086
    folders=$(grep -rl --include='*.go' --exclude='*_test.go' --exclude-dir=testdata '+k8s:openapi-gen=' pkg cmd $parts |
        xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^staging/src/#vendor/#; s#^#k8s.io/kubernetes/#' | paste -sd,)
    "$work/openapi-gen" -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r /dev/null
fi
# Two packages say which version it is: that of the programs, and that of clients and of `GET /version`.
flags="-s -w"
for package in component-base/version client-go/pkg/version; do
    at=k8s.io/kubernetes/vendor/k8s.io/$package
    flags+=" -X $at.gitVersion=v1.20.2 -X $at.gitMajor=1 -X $at.gitMinor=20"
done
for program in "${programs[@]}"; do
    [ -x "$target/$program" ] && continue
    say "building $program"
    go build -ldflags "$flags" -o "$work/$program" "./cmd/$program"
    mv "$work/$program" "$target/$program"
done
# What holds a pod's namespaces: it waits.
mkdir -p "$work/pause"
cat > "$work/pause/main.go" <<'GO'
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
GO
(cd "$work/pause" && go build -ldflags "-s -w" -o "$target/pause" main.go)
say "Kubernetes is in $target"
