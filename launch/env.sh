# Sourced by quickstart.sh and test.sh: finds a Python, makes .venv, installs the pinned packages.
#
# After `prepare_environment`, $ROOT is the checkout and $PY the environment's Python. A second call costs a
# hash of two files. Variables a user may set: PYTHON (a Python to prefer), K3TRAIN_VENV (another place for .venv).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="${K3TRAIN_VENV:-$ROOT/.venv}"
PY="$VENV/bin/python"
SUPPORTED="3.12 3.13 3.14" # what torch's pinned release has wheels for
FREE_GIB_NEEDED=8          # about 5 GiB installed, 3 GiB of downloads on the way

# A user's module path would put other versions in front of the pinned ones.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1 PIP_USER=false PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*"; }

die() {
  printf 'k3train: %s\n' "$*" >&2
  exit 1
}

# Prints why Python $1 cannot be used, and nothing when it can. Any Python may be asked, a Python 2 too.
python_problem() {
  local answer
  answer="$("$1" -E -c '
import sys
version = "%d.%d" % sys.version_info[:2]
if version not in sys.argv[1].split():
    print("is Python " + version)
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("is Python %s without the venv module" % version)
    print("end")
' "$SUPPORTED" </dev/null 2>/dev/null)" || answer="does not run"
  [ "$answer" = end ] || printf '%s\n' "$answer" | head -n 1
}

# Sets FOUND to the first usable Python of: $PYTHON, the PATH, pyenv's versions. Otherwise FOUND is empty and
# REJECTED says what was tried.
find_python() {
  FOUND="" REJECTED=""
  local version candidate problem
  if [ -n "${PYTHON:-}" ] && ! type -P -- "$PYTHON" >/dev/null; then REJECTED="PYTHON=$PYTHON does not exist"; fi
  while IFS= read -r candidate; do
    # Not the Python of the environment that is about to be made again, which an activated shell puts first.
    case "$candidate" in "$VENV"/*) continue ;; esac
    [ -x "$candidate" ] || continue
    problem="$(python_problem "$candidate")"
    if [ -z "$problem" ]; then
      FOUND="$candidate"
      return
    fi
    REJECTED="$REJECTED${REJECTED:+, }$candidate $problem"
  done < <(
    if [ -n "${PYTHON:-}" ]; then type -P -- "$PYTHON" || true; fi
    type -aP python3 || true
    for version in $SUPPORTED; do type -aP "python$version" || true; done
    # The newest patch release of the oldest supported version first.
    for version in $SUPPORTED; do
      printf '%s\n' "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions/$version."*/bin/python | sort -Vr
    done
  )
}

# Says why the environment cannot be used as it stands; nothing when pip may install into it.
venv_problem() {
  local problem stamped
  if [ ! -x "$PY" ]; then
    say "has no Python"
    return
  fi
  problem="$(python_problem "$PY")"
  if [ -n "$problem" ]; then
    say "has a Python that ${problem}"
    return
  fi
  if ! "$PY" -m pip --version >/dev/null 2>&1; then
    say "has no pip"
    return
  fi
  stamped="$(sed -n 2p "$VENV/k3train.stamp" 2>/dev/null || true)"
  if [ -n "$stamped" ] && [ "$stamped" != "$VENV for $ROOT" ]; then say "was made for another folder"; fi
}

# The state that an installed environment stands for: hash of both files, and the two folders.
stamp() {
  cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum | cut -d ' ' -f 1
  say "$VENV for $ROOT"
}

is_current() { [ "$(cat "$VENV/k3train.stamp" 2>/dev/null)" = "$(stamp)" ] && "$PY" -c '' 2>/dev/null; }

check_disk() {
  local folder="$VENV" free_kib
  while [ ! -d "$folder" ]; do folder="$(dirname "$folder")"; done
  free_kib="$(df -Pk "$folder" | awk 'NR == 2 {print $4}')"
  if [ "$free_kib" -lt $((FREE_GIB_NEEDED * 1024 * 1024)) ]; then
    die "the environment needs ${FREE_GIB_NEEDED} GiB of disk and $folder has $((free_kib / 1024 / 1024)) GiB free:" \
      "make room, or set K3TRAIN_VENV to a folder on a larger disk."
  fi
}

make_venv() {
  if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
    die "$VENV is not a virtual environment: move it away, or set K3TRAIN_VENV to another folder."
  fi
  find_python
  if [ -n "$FOUND" ]; then
    say "Making $VENV with $FOUND"
    rm -rf "$VENV"
    "$FOUND" -m venv "$VENV" || die "$FOUND could not make $VENV (its message is above): set PYTHON to another Python."
  elif command -v uv >/dev/null 2>&1; then
    say "Making $VENV with uv"
    rm -rf "$VENV"
    uv venv --quiet --seed --python 3.12 "$VENV" ||
      die "uv could not provide Python 3.12 (its message is above): install Python 3.12 or set PYTHON to one."
  else
    die "no usable Python ${SUPPORTED// /, } found${REJECTED:+ ($REJECTED)}: install one (Debian, Ubuntu:" \
      "apt install python3.12-venv) or uv, or set PYTHON to its path."
  fi
}

has_gpu() { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; }

# Shows the large downloads of pip's log as they come, so that minutes do not pass in silence.
show_large_files() {
  awk '/(Downloading|Using cached) .*\([0-9.]+ [MG]B\)/ {
         size = $(NF - 1); sub(/^\(/, "", size)
         if ($NF == "GB)" || size + 0 >= 100) { sub(/^ +/, ""); print "  " $0; fflush() }
       }
       /^Installing collected packages/ { print "  Unpacking"; fflush() }'
}

pip_install() {
  "$PY" -m pip install --constraint "$ROOT/constraints.txt" "$@" 2>&1 | tee -a "$LOG" | show_large_files || {
    { grep '^ERROR' "$LOG" || tail -n 5 "$LOG"; } | tail -n 5 | cut -c 1-300 | sed 's/^/  | /' >&2
    die "pip could not install the pinned packages: check the network or pip's settings, then run this again; log: $LOG"
  }
}

install_packages() {
  LOG="$VENV/install.log"
  : >"$LOG"
  if "$PY" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null; then
    say "Updating the pinned packages. Log: $LOG"
  else
    say "Installing the pinned packages (5 GiB on disk; minutes, by the network). Log: $LOG"
    install_cpu_torch
  fi
  pip_install setuptools # builds the two packages that have no wheel, k3train one of them
  pip_install --no-build-isolation --editable "$ROOT[dev]"
  local failure
  failure="$("$PY" -c 'import torch, megatron.core' 2>&1 | tail -n 1)" || true
  case "$failure" in
    *Error*) die "the installed torch does not start here: $failure" ;;
  esac
}

# Without a GPU, takes torch's CPU build if uv can reach it; says what will be downloaded otherwise.
install_cpu_torch() {
  if ! has_gpu; then
    if command -v uv >/dev/null 2>&1; then
      say "  No GPU here: trying uv for torch's small CPU build"
      uv pip install --quiet --python "$PY" --torch-backend=cpu --constraint "$ROOT/constraints.txt" \
        torch >>"$LOG" 2>&1 || say "  uv cannot reach the CPU build; pip takes the CUDA build, about 3 GB of downloads"
    else
      say "  No GPU here, but pip's index has only torch's CUDA build: about 3 GB of downloads"
    fi
  fi
}

prepare_environment() {
  local tool problem
  for tool in awk cut df grep sed sha256sum sort tail tee; do
    command -v "$tool" >/dev/null 2>&1 || die "the program $tool is missing: install it (Debian, Ubuntu: coreutils, grep, mawk, sed)."
  done
  if is_current; then return; fi
  # One installation at a time; the lock is on a folder, so it leaves no file behind.
  exec 9<"$ROOT/launch"
  if command -v flock >/dev/null 2>&1; then flock 9; fi
  if is_current; then
    exec 9<&-
    return
  fi
  if [ -e "$VENV" ]; then
    problem="$(venv_problem)"
    if [ -n "$problem" ]; then
      say "$VENV $problem: making it again"
      check_disk
      make_venv
    fi
  else
    check_disk
    make_venv
  fi
  install_packages
  stamp >"$VENV/k3train.stamp"
  exec 9<&-
  say "The environment is ready: $VENV"
}
