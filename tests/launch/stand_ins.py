"""Slurm's commands as small shell programs, which play a cluster on one machine."""

from __future__ import annotations

PATIENCE = 200
"""Seconds that a busy machine may take to import torch for each node; seconds on an idle one."""

SRUN = """#!/bin/bash
# Starts the command once per node; when one has ended, gives the others 15 seconds and then signals them, as
# srun --wait does after a minute; ends with the highest exit code.
case "$1" in --wait=*) shift ;; *) exit 99 ;; esac
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
  SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &
  pids="$pids $!"
done
wait -n
highest=$?
for _ in $(seq 150); do
  [ -n "$(jobs -rp)" ] || break
  sleep 0.1
done
kill -TERM $pids 2>/dev/null && sleep 0.5 && kill -TERM $pids 2>/dev/null
for pid in $pids; do
  wait "$pid"
  code=$?
  if [ "$code" -gt "$highest" ]; then highest=$code; fi
done
exit "$highest"
"""

SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo localhost; exit; fi
echo "scontrol $*" >> "$SLURM_LOG"
"""

SBATCH = """#!/bin/bash
echo "sbatch $*" >> "$SLURM_LOG"
"""
