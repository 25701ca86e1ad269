"""`srun` and the MPI library: what works, and what is said when they do not speak the same language (Behaviour 37)."""

import json
from pathlib import Path

from cluster import Cluster

SAY = "import mpidp; w = mpidp.init(); print(w.rank, w.size, w.local_rank, w.num_nodes, w.host)"
ALLOCATION = ("--nodes=2", "--ntasks-per-node=2")


def test_the_languages_agree(cluster: Cluster, workplace: Path) -> None:
    """MPICH speaks PMI-2, and is told which ranks share a node."""
    output = cluster.run("srun", "--mpi=pmi2", *ALLOCATION, "python", "-c", SAY, cwd=workplace)
    assert sorted(output.splitlines()) == ["0 4 0 2 n1", "1 4 1 2 n1", "2 4 0 2 n2", "3 4 1 2 n2"]


def test_they_do_not(cluster: Cluster, workplace: Path) -> None:
    """Instead of training four times alone: an error that names both sizes and the command."""
    words = ("python", "-m", "mpidp", "train", "run.toml")
    output = cluster.run("srun", "-K", "--mpi=none", *ALLOCATION, *words, cwd=workplace, check=False)
    assert "Slurm's srun started 4 processes, but MPI sees 1: every process would train alone." in output
    assert "srun --mpi=pmi2" in output
    assert not (workplace / "runs").exists()


def test_the_exit_code_of_a_rank_that_fails(cluster: Cluster, workplace: Path) -> None:
    """Behaviour 30: -K ends the others, which wait; the traceback is there."""
    code = "import mpidp; world = mpidp.init(); 1 / (world.rank - 3); world.barrier()"
    output = cluster.run("srun", "-K", "--mpi=pmi2", *ALLOCATION, "python", "-c", code, cwd=workplace, check=False)
    assert "[rank 3 of 4 on " in output and "ZeroDivisionError" in output


def test_doctor_compares_nodes(cluster: Cluster, workplace: Path) -> None:
    """Behaviour 46: one report on the ranks of both nodes; launcher and MPI library understand each other."""
    words = ("--mpi=pmi2", "-N2", "-n2", "python", "-m", "mpidp", "doctor", "data/digits.h5", "--json")
    (line,) = cluster.run("srun", *words, cwd=workplace).splitlines()
    report = json.loads(line)
    findings = {finding["code"]: finding for finding in report["findings"]}
    assert [rank["system"]["host"] for rank in report["ranks"]] == ["n1", "n2"]
    assert [(rank["launch"]["rank"], rank["mpi"]["size"]) for rank in report["ranks"]] == [(0, 2), (1, 2)]
    assert findings["launch"]["text"] == "Slurm's srun started 2 ranks; MPI has understood it"
    assert "nodes 2, tasks of the step 2" in findings["slurm"]["text"]
    assert "the clock of n2 differs from that of n1 by" in findings["job.clocks"]["text"]
    assert not [finding for finding in report["findings"] if finding["level"] == "FAIL"]


def test_doctor_says_why_ranks_are_alone(cluster: Cluster, workplace: Path) -> None:
    """Behaviours 37, 46: once, with the right command; the exit code is the step's."""
    text = 'srun --mpi=none -N2 -n2 python -m mpidp doctor data/digits.h5; echo "code $?"'
    output = cluster.run("bash", "-c", text, cwd=workplace)
    assert output.count("FAIL  launch.size") == 1 and "every process would train alone" in output, output
    assert "fix: srun --mpi=pmi2 ...; srun --mpi=list says what Slurm has" in output
    assert "code 3" in output.splitlines(), output
