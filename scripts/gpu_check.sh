#!/bin/sh
# Everything that asks for a GPU, by one command: docs/howto/gpu.md.
# PYTHON names the interpreter; without it that of .venv, else python3.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
exec "$PYTHON" benchmarks/gpu_check.py "$@"
