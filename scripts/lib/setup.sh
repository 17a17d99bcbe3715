# shellcheck shell=bash
# Sourced by scripts/*: makes the environment `.venv` in the checkout once, and reuses it after.
#
#   take_venv NAME ARGUMENTS...  $venv, by --venv or in the user's cache, for packages that must not be in .venv; $rest
#   ensure_environment EXTRAS    a C++ compiler that works, Python 3.11+, .venv with the package and its extras (dev,gguf)
#
# Leaves $ROOT and $PYTHON (the environment's) set and puts the environment's commands first in PATH. Progress goes to
# stderr. A failure says what is needed and exits 8 (environment), before anything long has started.
# $GEMMA_NEURON_PYTHON names an interpreter to use instead of the first fit one in PATH.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)"
PYTHON="$ROOT/.venv/bin/python"
CONSTRAINTS="$ROOT/scripts/constraints.txt"

# `SCRIPT --help`: the script's head, before anything is set up.
case "${1:-}" in
  -h | --help)
    sed -n '2,${/^#/!q; /^# shellcheck/q; s/^# \{0,1\}//; p}' "$0"
    exit 0
    ;;
esac

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $1"
  [ $# -lt 2 ] || say "hint: $2"
  exit 8
}

# Prints the path of the first interpreter that is new enough and can make environments.
find_python() {
  local candidate path
  for candidate in ${GEMMA_NEURON_PYTHON:+"$GEMMA_NEURON_PYTHON"} python3.11 python3.12 python3.13 python3; do
    path="$(command -v -- "$candidate")" || continue
    # ensurepip is a package of its own on Debian; without it `venv` stops half way
    "$path" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue
    printf '%s\n' "$path"
    return
  done
  fail "Python 3.11, 3.12 or 3.13 with the venv module is needed, and none is in PATH (python3 is $(python3 -V 2>/dev/null || echo missing))" \
    "apt-get install python3 python3-venv (Debian, Ubuntu) or dnf install python3.11, or name one: GEMMA_NEURON_PYTHON=/path/to/python3.11"
}

compiler_hint() {
  case "$(uname -s)" in
    Darwin) say "hint: xcode-select --install, and for OpenMP: brew install libomp" ;;
    *) say "hint: apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, Amazon Linux); another one is named by CXX=/path/to/compiler" ;;
  esac
}

# The cpu back end compiles each graph to native code; without a compiler every run would fail minutes from here.
check_compiler() {
  local compiler="${CXX:-}" candidate scratch
  if [ -z "$compiler" ]; then
    for candidate in g++ clang++; do
      if command -v "$candidate" >/dev/null; then compiler="$candidate"; break; fi
    done
  fi
  if [ -z "$compiler" ]; then
    say "error: a C++ compiler is needed to build graphs, and neither g++ nor clang++ is in PATH"
    compiler_hint
    exit 8
  fi
  scratch="$(mktemp -d)"
  cat >"$scratch/probe.cpp" <<'CPP'
#include <omp.h>
#include <string_view>
int main() { if constexpr (sizeof(void *) > 0) { return std::string_view("x").size() == 1 && omp_get_max_threads() > 0 ? 0 : 1; } }
CPP
  # $CXX may carry arguments, as make has it: unquoted on purpose
  # shellcheck disable=SC2086
  if ! $compiler -std=c++17 -fopenmp -shared -fPIC "$scratch/probe.cpp" -o "$scratch/probe.so" 2>"$scratch/log" \
    || ! $compiler -std=c++17 -fopenmp "$scratch/probe.cpp" -o "$scratch/probe" 2>>"$scratch/log" \
    || ! "$scratch/probe" 2>>"$scratch/log"; then
    say "error: the C++ compiler '$compiler' cannot build a C++17 program with -fopenmp. It said:"
    sed 's/^/  /' "$scratch/log" | head -n 20 >&2
    rm -rf -- "$scratch"
    compiler_hint
    exit 8
  fi
  rm -rf -- "$scratch"
}

# What the environment depends on, and nothing else: change one of them and it is brought up to date.
environment_key() {
  {
    "$1" -c 'import sys; print(sys.version)'
    cat -- "$ROOT/pyproject.toml" "$CONSTRAINTS"
  } | "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# False for what an interrupted run left, for one whose Python is gone, and for one that came along when the checkout was
# copied or moved: its commands would run the old place's code.
environment_works() {
  [ -x "$PYTHON" ] && head -n 2 -- "$ROOT/.venv/bin/pip" 2>/dev/null | grep -qF -- "$ROOT/.venv/bin/python" && "$PYTHON" -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# run_quietly WHAT COMMAND...: one line of progress; the output only when it fails.
run_quietly() {
  local what="$1" log
  shift
  say "setup: $what"
  log="$(mktemp)"
  if "$@" >"$log" 2>&1; then
    rm -f -- "$log"
    return
  fi
  say "error: $what failed: $*"
  tail -n 40 -- "$log" | sed 's/^/  /' >&2
  rm -f -- "$log"
  exit 8
}

# $venv: the folder that `--venv DIR` names, or NAME in the user's cache. $rest: the other arguments.
# shellcheck disable=SC2034  # both are for the script that sources this
take_venv() {
  venv="${XDG_CACHE_HOME:-$HOME/.cache}/gemma-neuron/$1" rest=()
  shift
  while [ $# -gt 0 ]; do
    if [ "$1" = --venv ]; then
      [ -n "${2:-}" ] || { say "error: --venv needs a folder"; exit 2; }
      venv="$2"
      shift
    else
      rest+=("$1")
    fi
    shift
  done
}

make_environment() {
  local base="$1" key="$2" extras="$3" stamp="$4" started=$SECONDS
  if ! environment_works; then
    rm -rf -- "$ROOT/.venv"
    run_quietly "making .venv with $("$base" -V)" "$base" -m venv "$ROOT/.venv"
  fi
  rm -f -- "$stamp"
  run_quietly "installing gemma-neuron[$extras] and what it needs (minutes the first time)" \
    "$PYTHON" -m pip install --disable-pip-version-check --quiet --constraint "$CONSTRAINTS" --editable "${ROOT}[$extras]"
  # the stamp comes last: an interrupted install has none and is done again
  printf '%s\n' "$key" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
  say "setup: done in $((SECONDS - started)) s"
}

ensure_environment() {
  local extras="$1" base key stamp
  check_compiler
  # an environment that works decides the interpreter; otherwise one is looked for
  if environment_works; then base="$PYTHON"; else base="$(find_python)"; fi
  key="$(environment_key "$base")"
  stamp="$ROOT/.venv/.gemma-neuron-${extras//,/-}.stamp"
  if [ "$(cat -- "$stamp" 2>/dev/null)" != "$key" ] || ! environment_works; then
    (
      if command -v flock >/dev/null; then
        flock --nonblock 9 || { say "setup: waiting for another run that is setting up .venv"; flock 9; }
      fi
      # whoever had the lock may have done it
      if [ "$(cat -- "$stamp" 2>/dev/null)" != "$key" ] || ! environment_works; then
        make_environment "$base" "$key" "$extras" "$stamp"
      fi
    ) 9>"$ROOT/.venv.lock" || exit $?
  fi
  export PATH="$ROOT/.venv/bin:$PATH"
}
