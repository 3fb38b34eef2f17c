#!/bin/sh
# Check KvLLM on this machine's GPU with the Python that is there. Nothing is downloaded.
#
#   benchmarks/device_check.sh [--packages DIR] [arguments of python -m benchmarks.device_check]
#
# DIR holds what that machine lacks (benchmarks/device_pack.sh fills it): packages, as wheels or unpacked, and compiled
# operators, which are used if the checkout has none. PYTHON names another interpreter than python3.
set -eu
PYTHON=${PYTHON:-python3}
site=

if [ "${1:-}" = --packages ]; then
    packages=$(cd "$2" && pwd)
    shift 2
    for operators in "$packages"/_C*.so; do
        copy="$(dirname "$0")/../kvllm/${operators##*/}"
        if [ -e "$operators" ] && [ ! -e "$copy" ]; then cp "$operators" "$copy"; fi
    done
    if ls "$packages"/*.whl >/dev/null 2>&1; then
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$packages"/*.whl
        packages=$site
    fi
    PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi

cd "$(dirname "$0")/.."
missing=$("$PYTHON" - <<'PROGRAM'
import re, tomllib
from importlib.util import find_spec

with open("pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"] + ["matplotlib", "pytest", "hypothesis"]
names = {re.match(r"[\w-]+", entry)[0] for entry in needed} - {"protobuf"}  # which reads tokenizer.model files alone
print(" ".join(name for name in sorted(names) if find_spec(name) is None))
PROGRAM
)
if [ -n "$missing" ]; then
    echo "error: $PYTHON lacks: $missing" >&2
    echo "Where there is a package index: benchmarks/device_pack.sh packages $missing" >&2
    echo "Then, here: $0 --packages packages" >&2
    exit 2
fi
"$PYTHON" -m benchmarks.device_check "$@"
