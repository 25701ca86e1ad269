#!/bin/bash
# What wrapping a model costs: one rank beside plain torch, then two ranks beside torch's DDP over Gloo.
# Usage: benchmarks/step_overhead.sh [repeats]; MPIEXEC and PYTHON choose another launcher or environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

repeats=${1:-40}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra mpiexec <<< "${MPIEXEC:-.venv/bin/mpiexec}"
python=${PYTHON:-.venv/bin/python}

printf 'load average before: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
"${mpiexec[@]}" -n 1 "$python" -m mpidp bench step --reducers plain,auto --repeats "$repeats"
"${mpiexec[@]}" -n 2 "$python" -m mpidp bench step --reducers null,flat --against ddp --repeats "$repeats"
printf 'load average after: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
