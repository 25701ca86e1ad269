#!/bin/bash
# A number and a rate in; hosts mpidp-h1, mpidp-h2, ... on this machine out. Root only; needs iproute2.
#
#   tests/cluster/hosts.sh up 4 1gbit      # also replaces hosts that are there already
#   tests/cluster/hosts.sh down            # and nothing is left
#
# A host is a network namespace. Its one link hangs on a bridge and is limited to RATE in each direction. Names are
# looked up in /etc/netns/HOST/hosts, which `ip netns exec` mounts over /etc/hosts; the machine's own file stays as it is.
set -euo pipefail

prefix=mpidp-h           # host i is mpidp-h<i>
port=mpidp-p             # its port on the bridge is mpidp-p<i>; names of interfaces have at most 15 characters
bridge=mpidp-br0
subnet=10.78.0           # host i is 10.78.0.<i>, the machine itself 10.78.0.254
max_hosts=64
burst=512kb              # what may pass at once; at least RATE / HZ, or the link is slower than RATE
latency=100ms            # a packet that would queue for longer is dropped

usage() {
  echo "usage: $0 up [HOSTS=4] [RATE=1gbit] | down" >&2
  exit 2
}

limit() { # COMMAND-PREFIX... DEVICE: what leaves by this device leaves at RATE
  local device=${*: -1}
  "${@:1:$#-1}" tc qdisc add dev "$device" root tbf rate "$rate" burst "$burst" latency "$latency"
}

names() { # HOSTS: lines of a hosts file
  printf '127.0.0.1 localhost\n%s.254 mpidp-br0\n' "$subnet"
  local i
  for i in $(seq 1 "$1"); do printf '%s.%d %s%d\n' "$subnet" "$i" "$prefix" "$i"; done
}

add_bridge() {
  ip link add "$bridge" type bridge
  ip addr add "$subnet.254/24" dev "$bridge"
  ip link set "$bridge" up
}

add_host() { # NUMBER HOSTS
  local host=$prefix$1 end=$port$1
  mkdir -p "/etc/netns/$host"
  names "$2" >"/etc/netns/$host/hosts"
  ip netns add "$host"
  ip link add "$end" type veth peer name eth0 netns "$host"
  ip -n "$host" addr add "$subnet.$1/24" dev eth0
  ip -n "$host" link set lo up
  ip -n "$host" link set eth0 up
  ip link set "$end" master "$bridge" up
  limit ip netns exec "$host" eth0
  limit env "$end"
}

up() { # HOSTS
  local i
  add_bridge
  for i in $(seq 1 "$1"); do add_host "$i" "$1"; done
}

down() { # everything with our names, whatever an earlier run left half done
  local host device process
  for host in $(ip netns list | awk -v prefix="$prefix" 'index($1, prefix) == 1 {print $1}'); do
    for process in $(ip netns pids "$host"); do kill -KILL "$process" 2>/dev/null || true; done # it may have ended
    ip netns del "$host"
    rm -rf "/etc/netns/$host"
  done
  for device in $(ip -o link show | awk -F'[ @:]+' -v port="$port" 'index($2, port) == 1 {print $2}') "$bridge"; do
    # The kernel takes a deleted host's port away by itself, a moment later: it may go between two commands here.
    while ip link show "$device" >/dev/null 2>&1; do ip link del "$device" 2>/dev/null || true; done
  done
  if [[ -d /etc/netns ]]; then rmdir --ignore-fail-on-non-empty /etc/netns; fi
}

all_or_nothing() { # at the end of `up`
  local status=$?
  ((status == 0)) || down
  exit "$status"
}

command=${1:-} hosts=${2:-4} rate=${3:-1gbit}
[[ $hosts =~ ^[0-9]+$ && $hosts -ge 1 && $hosts -le $max_hosts ]] || usage
case $command in
  up)
    down
    trap all_or_nothing EXIT
    up "$hosts"
    ;;
  down) down ;;
  *) usage ;;
esac
