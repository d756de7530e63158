#!/usr/bin/env bash
# The main job from start to end: a build machine plans, compiles and pushes; a serving machine with an
# empty cache and no C++ compiler on its PATH pulls and decodes. `make demo` sets everything up and takes
# the small Llama, `make demo-eagle3` the same with a draft model.
set -euo pipefail
cd "$(dirname "$0")/.."

config=${1:-configs/quickstart.yaml}
name=$(basename "$config" .yaml)
work=$(mktemp -d)
trap '/bin/rm -rf "$work"' EXIT
# The serving machine finds neffbuild and nothing else.
mkdir "$work/bin"
ln -s "$(command -v neffbuild)" "$work/bin/neffbuild"

run() {
    printf '\n$ %s\n' "${*//$work/DEMO}"
    "$@" | /bin/sed "s|$work|DEMO|g"
}

echo "# build machine"
export NEFFBUILD_CACHE="$work/build-cache"
run neffbuild plan "$config"
run neffbuild compile "$config"
run neffbuild compile "$config"
run neffbuild push "$config" --to "$work/store" --tag demo

echo
echo "# serving machine: empty cache, no compiler"
export NEFFBUILD_CACHE="$work/serving-cache" PATH="$work/bin:/bin-without-compilers"
run neffbuild pull "$work/store" --tag "$name:demo"
run neffbuild verify "$config"
run neffbuild replay "$config" --steps 200 --execute
