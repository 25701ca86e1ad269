#!/bin/bash
# Checks that need a GPU; under ten minutes on one. Two ranks share it, so it is allowed here.
#
#   tests/gpu/run.sh [PYTHON] [MPIEXEC]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${1:-.venv/bin/python}
mpiexec=${2:-$(dirname "$python")/mpiexec}
export OMP_NUM_THREADS=1 MPIDP_SHARE_GPU=1

"$python" -c 'import torch; assert torch.cuda.is_available(), "no GPU here"; print(torch.cuda.get_device_name())'
for ranks in 1 2; do
  "$mpiexec" -n "$ranks" "$python" -m pytest -q -p no:cacheprovider tests/gpu
done

runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
for ranks in 1 2; do # the same held-out loss at any number of ranks
  "$mpiexec" -n "$ranks" "$python" -m mpidp train jobs/digits.toml --run.folder="$runs" --run.name="ranks$ranks"
done
"$python" - "$runs" <<'PYTHON'
import json, pathlib, sys
one, two = (json.loads((pathlib.Path(sys.argv[1]) / f"ranks{n}/metrics.jsonl").read_text().splitlines()[-1]) for n in (1, 2))
print("held out:", one, two)
assert abs(one["loss"] - two["loss"]) < 1e-2 and two["accuracy"] >= 0.97
PYTHON

"$mpiexec" -n 2 "$python" -m mpidp bench allreduce --bytes=1048576,67108864 --reducers=auto,staged,copy
"$mpiexec" -n 2 "$python" -m mpidp bench step --reducers=null,staged/after,staged/overlap,staged/bf16/overlap
