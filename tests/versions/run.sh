#!/bin/bash
# The built packages on the oldest and the newest versions that setup.cfg allows, each in a clean environment.
# Usage: tests/versions/run.sh [oldest|newest ...]
#
# torch is the version of constraints.txt in both: PyPI's builds of the oldest are for CUDA and have several gigabytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

pinned() { sed -n "s/^\($1==.*\)$/\1/p" constraints.txt; }
oldest() { sed -n "s/^ *\($1\)>=\([0-9.]*\)$/\1==\2.*/p" setup.cfg | head -1; }

# Both archives are built from what git knows, the wheel from the sdist.
git archive HEAD | tar -x --one-top-level="$folder/source"
.venv/bin/python -m build --no-isolation --outdir "$folder/dist" "$folder/source" >"$folder/build.log" 2>&1 || {
  cat "$folder/build.log"
  exit 1
}
wheel=$(echo "$folder"/dist/*.whl)

smoke_test() { # BIN
  "$1/mpiexec" -n 2 "$1/mpidp" train jobs/digits.toml --train.epochs=2 &&
    "$1/mpiexec" -n 3 "$1/mpidp" train jobs/digits.toml --train.epochs=4 --resume runs/digits &&
    "$1/mpiexec" -n 2 "$1/python" jobs/own_loop.py
}

try() { # NAME REQUIREMENT...: install, import, train on 2 ranks, resume on 3
  local name=$1 bin=$folder/$1/bin
  shift
  "$PYTHON" -m venv "$folder/$name"
  "$bin/pip" install --quiet "$(pinned torch)" "$(pinned mpich)" # bare torch would bring another build
  # PyPI has the oldest mpi4py as source only: it is compiled against the MPI of the environment, as on a cluster, and
  # must not come from pip's cache, as it holds the path of that MPI.
  MPICC=$bin/mpicc CFLAGS=-O0 "$bin/pip" install --quiet --no-cache-dir "$@" "$wheel"
  "$bin/pip" list 2>/dev/null | grep -iE '^(torch|numpy|h5py|mpi4py|mpich) ' | xargs echo "$name:"
  mkdir "$folder/$name/job"
  cp -r jobs data "$folder/$name/job"
  (
    cd "$folder/$name/job"
    export OMP_NUM_THREADS=1
    "$bin/python" -W error -c 'import mpidp; [getattr(mpidp, name) for name in mpidp.__all__]'
    smoke_test "$bin" >log 2>&1 || {
      cat log
      exit 1
    }
    grep '^Trained' log
  )
}

passed=0
for name in "${@:-oldest newest}"; do
  for row in $name; do
    case $row in
    oldest) try oldest "$(oldest numpy)" "$(oldest h5py)" "$(oldest mpi4py)" ;;
    newest) try newest --upgrade numpy h5py mpi4py ;;
    *)
      echo "usage: tests/versions/run.sh [oldest|newest ...]" >&2
      exit 2
      ;;
    esac
    passed=$((passed + 1))
  done
done
echo "$passed passed, 0 failed"
