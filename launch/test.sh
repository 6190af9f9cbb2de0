#!/usr/bin/env bash
# Checks everything: lint, format, types, import direction, tests. Arguments go to pytest: ./launch/test.sh -k router
# runs some of the tests, -m slow the long ones that are left out otherwise, -m "" all.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare_environment
cd "$ROOT"
# Tests start ranks of their own; more threads than ranks only fight for the cores.
export OMP_NUM_THREADS=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1

check() {
  local name="$1" fix="$2"
  shift 2
  printf '\n== %s\n' "$name"
  "$@" || die "$name failed: $fix"
}

check "ruff check" "mend the lines above; '$PY -m ruff check --fix .' mends most" "$PY" -m ruff check .
check "ruff format" "run '$PY -m ruff format .'" "$PY" -m ruff format --check .
check "pyright" "mend the types above" "$PY" -m pyright --pythonpath "$PY"
check "import direction" "move the import named above; the layers are in pyproject.toml" \
  "$PY" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
printf '\n== pytest\n'
# Two files of tests at a time: many tests keep one core busy only.
exec "$PY" -m pytest -n 2 --dist loadfile "$@"
