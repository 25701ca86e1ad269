#!/bin/bash
# How a job starts: mpidp's own share beyond importing torch, its checks, and what one rank asks of file systems.
# Usage: benchmarks/startup.sh [repeats]; PYTHON and MPIEXEC choose another environment or launcher.
# Calls are counted by strace (Debian: apt-get install strace); without it only times are shown. Those in /proc, /sys
# and /dev are left out: they are the kernel's, and not on a file system that thousands of ranks share.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

repeats=${1:-5}
read -ra mpiexec <<< "${MPIEXEC:-.venv/bin/mpiexec}"
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE # an installed package has its bytecode

count() { # count NAME WORDS...: calls that open, look at or list files, those that found nothing in brackets
    local name=$1 log
    shift
    log=$(mktemp)
    strace -f -qq -e trace=open,openat,stat,lstat,newfstatat,statx,access,faccessat,faccessat2,readlink,readlinkat,getdents64 \
        -e signal=none -o "$log" "$@" > /dev/null 2>&1
    sed -i -E '\#"(\.\./)*/?(proc|sys|dev|devices)(/|")#d' "$log"
    printf '%-42s %7d calls, of which %d found nothing\n' "$name" "$(wc -l < "$log")" "$(grep -c ENOENT "$log" || true)"
    rm -f "$log"
}

printf 'load average before: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
"$python" benchmarks/startup.py 1 > /dev/null # writes bytecode that is missing
"$python" benchmarks/startup.py "$repeats"
for ranks in 0 4; do
    words=("$python" -m mpidp doctor)
    [ "$ranks" = 0 ] || words=("${mpiexec[@]}" -n "$ranks" "${words[@]}")
    start=$(date +%s.%N)
    "${words[@]}" > /dev/null
    printf 'mpidp doctor, %s ranks: %.2f s\n' "$ranks" "$(echo "$(date +%s.%N) - $start" | bc)"
done
if command -v strace > /dev/null; then
    echo 'file-system metadata operations of one process:'
    count 'python' "$python" -c pass
    count 'import torch' "$python" -c 'import torch'
    count 'import torch, h5py' "$python" -c 'import torch, h5py'
    count 'import torch, h5py, mpidp (all of it)' "$python" -c 'import torch, h5py, mpidp.train.trainer'
    count 'import torch, h5py, mpidp; mpidp.init()' "$python" -c 'import torch, h5py, mpidp.train.trainer as t; t.init()'
    count 'mpidp --help' "$python" -m mpidp --help
fi
printf 'load average after: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
