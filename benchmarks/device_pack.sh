#!/bin/sh
# Collect what a bare machine with a GPU lacks: the compiled operators, and wheels of packages.
#
#   benchmarks/device_pack.sh DIR [PACKAGE...]
#
# PACKAGE: msgspec alone by default, which benchmarks/device_check.sh --packages DIR then installs for itself there.
# PYTHON names another interpreter than that of .venv, PYTHON_VERSION that of the machine (3.12).
set -eu
if [ $# -eq 0 ]; then
    echo "usage: $0 DIR [PACKAGE...]" >&2
    exit 2
fi
mkdir -p "$1"
packages=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
if ! ls kvllm/_C*.so >/dev/null 2>&1; then
    echo "error: there are no compiled operators in kvllm/: build them first, with: make venv" >&2
    exit 2
fi
[ $# -gt 0 ] || set -- msgspec
cp kvllm/_C*.so "$packages"  # one build serves every Python from 3.11 and every torch from 2.11 on
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -c constraints.txt -d "$packages" "$@"
echo "$packages: $(cd "$packages" && echo *)"
