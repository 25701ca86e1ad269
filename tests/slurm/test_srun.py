"""`srun` and the MPI library: what works, and what is said when they do not speak the same language (Behaviour 37)."""

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
