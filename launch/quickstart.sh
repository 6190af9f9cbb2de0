#!/usr/bin/env bash
# From a fresh checkout to a trained small model: makes the environment, builds the tiny corpus, runs the debug
# curriculum, prints a summary. Safe to run again: it skips what is there and goes on with a run that stopped.
# Arguments change the run: ./launch/quickstart.sh name=mine optim.weight_decay=0.05
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
started=$SECONDS
prepare_environment
cd "$ROOT"
run=(experiment=debug "$@")

answer="$("$PY" launch/summary.py "${run[@]}" --state)" || die "these settings cannot be used; the reason is above."
state="${answer%% *}" folder="${answer#* }"

if [ "$state" != finished ]; then
  say "== corpus"
  "$PY" -m k3train data build tiny || die "the tiny corpus could not be built; the reason is above."
fi

case "$state" in
  new) say "== training in $folder" ;;
  interrupted) say "== going on with the run in $folder" ;;
  finished) say "== the run in $folder is finished; remove that folder, or give name=..., to train again" ;;
esac
if [ "$state" != finished ]; then
  code=0
  "$PY" -m k3train train "${run[@]}" || code=$?
  case "$code" in
    0) ;;
    75)
      say "k3train: stopped and saved; the same command goes on from there."
      exit 75
      ;;
    2) die "these settings or data cannot be trained; the reason is above, and name=second starts another run." ;;
    *) die "training ended with code $code; its reason is above, and the same command goes on from the last checkpoint." ;;
  esac
fi

say "== summary"
"$PY" launch/summary.py "${run[@]}"
say ""
say "== sample"
prompt="The "
"$PY" -m k3train sample "$folder" --prompt "$prompt" --tokens 60 || die "sampling failed; the reason is above."
cat <<NEXT

== next
  source "$VENV/bin/activate"
  k3train show experiment=debug                       every setting, the stages, the parameters
  k3train sample "$folder" --prompt "Once "          more text
  k3train train experiment=debug name=second seed=2   another run
  ./launch/test.sh                                    the tests
This took $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s.
NEXT
