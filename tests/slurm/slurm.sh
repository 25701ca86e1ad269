#!/bin/bash
# A folder in; a Slurm of two nodes on this machine out, with fake GPUs and a partition that preempts. Root only;
# needs slurmctld, slurmd, slurm-client, munge (Debian 12: Slurm 22.05) and unshare. No systemd, cgroups or database.
#
#   tests/slurm/slurm.sh up FOLDER        # replaces one that is there; then export SLURM_CONF=FOLDER/slurm.conf
#   tests/slurm/slurm.sh kill n2 FOLDER   # the node's daemon and all of its jobs' processes die at once
#   tests/slurm/slurm.sh start n2 FOLDER  # the node comes back
#   tests/slurm/slurm.sh down FOLDER      # and nothing is left but the folder
#
# Nodes n1 and n2 are two daemons with ports of their own. What is shortened for tests: how long a job has after
# SIGTERM (KillWait), how long a requeued one waits (cred_expire), how soon a silent node is noticed (SlurmdTimeout).
set -euo pipefail

nodes=(n1 n2)
first_port=17001         # of slurmd on n1; n2 has the next
controller_port=17000

usage() {
  echo "usage: $0 up FOLDER | down FOLDER | kill NODE FOLDER | start NODE FOLDER" >&2
  exit 2
}

configure() {
  local host
  host=$(hostname)
  cat >"$folder/slurm.conf" <<CONF
ClusterName=mpidp
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
KillWait=3
SlurmdTimeout=10
MinJobAge=600
GresTypes=gpu
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$first_port-$((first_port + 1))] CPUs=4 RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=01:00:00 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 PriorityTier=10 PreemptMode=OFF
CONF
  echo "NodeName=n[1-2] Name=gpu File=$folder/gpu[0-1]" >"$folder/gres.conf" # plain files do
}

start_munge() { # one of our own: the machine's, if there is one, is left alone
  local home=$folder/munge
  mkdir -p "$home"
  dd if=/dev/urandom of="$home/key" bs=1024 count=1 status=none
  chmod 600 "$home/key"
  munged --key-file="$home/key" --socket="$home/socket" --pid-file="$home/pid" --log-file="$home/log" \
    --seed-file="$home/seed" --force
}

# A node has its own name and its own shared memory. MPI libraries name their segments after the job, and two nodes of
# one job would take each other's.
start_node() { # NODE
  # shellcheck disable=SC2016  # the inner shell expands it
  SLURMD_NODENAME=$1 unshare --mount --uts bash -euc '
    hostname "$SLURMD_NODENAME"
    mount -t tmpfs none /dev/shm
    exec slurmd -N "$SLURMD_NODENAME" -f "$SLURM_CONF"'
}

processes_of() { # NODE or "": what a node started, daemon, step daemons and tasks, of any node if none is named
  local environment=()
  local file parent
  for file in /proc/[0-9]*/environ; do
    mapfile -d '' -t environment 2>/dev/null <"$file" || continue # it ended, or is a kernel thread
    [[ " ${environment[*]} " == *" SLURM_CONF=$folder/slurm.conf "* ]] || continue
    [[ " ${environment[*]} " == *" SLURMD_NODENAME=$1"* ]] || continue
    file=${file%/environ}
    echo "${file#/proc/}"
    # A step daemon writes its title over its environment; it is the parent of its tasks.
    parent=$(awk '/^PPid:/ {print $2}' "$file/status" 2>/dev/null || true)
    if [[ $(cat "/proc/$parent/comm" 2>/dev/null) == slurmstepd ]]; then echo "$parent"; fi
  done
}

kill_node() { # NODE or "": at once, as a node that loses power; again until nothing is left that was just starting
  local pids
  while pids=$(processes_of "$1") && [[ -n $pids ]]; do
    # shellcheck disable=SC2086  # one word each
    kill -KILL $pids 2>/dev/null || true # some have ended meanwhile
    sleep 0.1
  done
}

end_daemon() { # PID-FILE
  local pid
  [[ -s $1 ]] || return 0
  pid=$(<"$1")
  kill "$pid" 2>/dev/null || return 0
  while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
}

down() {
  [[ -d $folder ]] || return 0
  end_daemon "$folder/slurmctld.pid"
  kill_node ""
  end_daemon "$folder/munge/pid"
}

up() {
  down
  rm -rf "$folder"
  mkdir -p "$folder/state" "$folder/spool-n1" "$folder/spool-n2"
  touch "$folder/gpu0" "$folder/gpu1"
  configure
  start_munge
  export SLURM_CONF=$folder/slurm.conf
  slurmctld -f "$SLURM_CONF"
  local node
  for node in "${nodes[@]}"; do start_node "$node"; done
  local try
  for try in {1..100}; do
    [[ $(sinfo -h -t idle -o %D -p main 2>/dev/null) == "${#nodes[@]}" ]] && return
    sleep 0.2
  done
  echo "the nodes did not come up within 20 s (try $try):" >&2
  tail -n 20 "$folder"/*.log >&2
  return 1
}

command=${1:-}
case $command in
  up | down) [[ $# == 2 ]] || usage; folder=$(realpath -m "$2") ;;
  kill | start) [[ $# == 3 ]] || usage; node=$2 folder=$(realpath -m "$3") ;;
  *) usage ;;
esac
case $command in
  up)
    # shellcheck disable=SC2154  # set inside the trap
    trap 'status=$?; ((status == 0)) || down; exit $status' EXIT # all of it or nothing
    up
    ;;
  down) down ;;
  kill) kill_node "$node" ;;
  start)
    export SLURM_CONF=$folder/slurm.conf
    start_node "$node"
    ;;
esac
