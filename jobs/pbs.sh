#!/bin/bash
# PBS Pro, OpenPBS: qsub jobs/pbs.sh, or qsub -v RUN=jobs/gpt.toml jobs/pbs.sh
# Lines marked SITE are those that a cluster changes. Not run by the project's tests: they have no PBS.

#PBS -N mpidp
#PBS -j oe
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l walltime=01:00:00
##PBS -q gpu                            # SITE: remove one # and name your queue
##PBS -A project                        # SITE: remove one # and name your account
# SITE, above: nodes:cores of a node:ranks of a node (one for each GPU):GPUs of a node, and the longest time

set -euo pipefail
cd "$PBS_O_WORKDIR"
cores=32 ranks_per_node=4               # SITE: as above

# module load openmpi                   # SITE: the MPI that mpi4py uses
# source .venv/bin/activate             # SITE: the Python environment with mpidp

export OMP_NUM_THREADS=$((cores / ranks_per_node))
ranks=$(wc -l <"$PBS_NODEFILE")         # a line for each rank

# Built with PBS support, mpiexec knows the nodes; otherwise add --hostfile (Open MPI) or -f (MPICH) "$PBS_NODEFILE".
# SITE: on Cray systems with PALS it is mpiexec -n "$ranks" --ppn $ranks_per_node --cpu-bind depth -d $OMP_NUM_THREADS
code=0
mpiexec -n "$ranks" python -m mpidp train "${RUN:-jobs/digits.toml}" --resume=auto || code=$?

# 75: stopped early (a file STOP in the run folder), everything saved; qsub again continues.
echo "mpidp ended with exit code $code"
exit "$code"
