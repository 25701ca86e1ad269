#!/bin/bash
# LSF: bsub < jobs/lsf.sh, or RUN=jobs/gpt.toml bsub -env all < jobs/lsf.sh
# Lines marked SITE are those that a cluster changes. Not run by the project's tests: they have no LSF.

#BSUB -J mpidp
#BSUB -o lsf-mpidp-%J.out
#BSUB -n 8
#BSUB -R "span[ptile=4] affinity[core(8)]"
#BSUB -gpu "num=4"
#BSUB -W 01:00
#BSUB -wa USR2 -wt 2
##BSUB -q gpu
# SITE, above: ranks in all; ranks of a node (one for each GPU) and cores of a rank; GPUs of a node; longest time; the
# signal sent two minutes before that, on which all ranks save and end with exit code 75, if the launcher passes it on

set -euo pipefail

# module load openmpi                   # SITE: the MPI that mpi4py uses
# source .venv/bin/activate             # SITE: the Python environment with mpidp

export OMP_NUM_THREADS=8                # SITE: cores of a rank, as above

# LSF's script gets the signal too, and must outlive it until the ranks have saved.
trap : USR2

# SITE: on Summit-like machines jsrun -n 8 -a 1 -c 8 -g 1 --smpiargs="-gpu" python ...
code=0
mpiexec -n "$LSB_DJOB_NUMPROC" python -m mpidp train "${RUN:-jobs/digits.toml}" --resume=auto || code=$?

echo "mpidp ended with exit code $code"
exit "$code"
