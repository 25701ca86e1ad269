"""Run a Python command on four hosts on 1 Gbit/s links, which are brought up for it and removed. Root only.

python tests/cluster/on_hosts.py [--ranks-per-host 1] -m mpidp bench allreduce --reducers flat,mpi --against gloo
"""

import argparse
import sys

from cluster import MAX_HOSTS, RATE, hosts_down, hosts_up, run_on_hosts


def main() -> int:
    """Runs the words after the options as a Python command on all hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    hosts_up(MAX_HOSTS, RATE)
    try:
        done = run_on_hosts(
            [sys.executable, *options.words],
            MAX_HOSTS,
            options.ranks_per_host,
            options.timeout_s,
            environment={"GLOO_SOCKET_IFNAME": "eth0"},
            check=False,
        )
    finally:
        hosts_down()
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
