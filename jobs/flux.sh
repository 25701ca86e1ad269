#!/bin/bash
# Flux: flux batch jobs/flux.sh [RUN.toml] [--SECTION.KEY=VALUE ...]
# Lines marked SITE are those that a cluster changes. Not run by the project's tests: they have no Flux.

# flux: --job-name=mpidp
# flux: --output=flux-mpidp-{{id}}.out
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=1h
# SITE, above: nodes, and the longest time

set -euo pipefail
nodes=2 ranks_per_node=4 cores_per_rank=8 # SITE: as above; one rank for each GPU of a node

# module load mpich                     # SITE: the MPI that mpi4py uses
# source .venv/bin/activate             # SITE: the Python environment with mpidp

export OMP_NUM_THREADS=$cores_per_rank

# gpu-affinity=off: every rank sees all GPUs of its node and mpidp gives each its own.
# --signal: two minutes before the end all ranks save and end with exit code 75.
# SITE: Open MPI needs -o pmi=pmix, where Flux has the plugin.
code=0
flux run --nodes=$nodes --ntasks=$((nodes * ranks_per_node)) --cores-per-task=$cores_per_rank --gpus-per-task=1 \
  -o gpu-affinity=off -o cpu-affinity=per-task --signal=SIGUSR2@2m \
  python -m mpidp train "${@:-jobs/digits.toml}" --resume=auto || code=$?

echo "mpidp ended with exit code $code"
exit "$code"
