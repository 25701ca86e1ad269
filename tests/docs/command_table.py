"""How each command of the pages is run by the tests, or why it is not.

A command that is not here makes `test_commands.py` fail. Prefer `Run`; `Elsewhere` where a test has what it needs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from page_commands import ROOT, TUTORIAL, commands


@dataclass(frozen=True)
class Run:
    """Run here, in the order of the page.

    Attributes:
        shows: must be in its output; `{}` stands for anything.
        instead: parts of the command and what they are here: placeholders, and settings that take minutes.
        code: the exit code.
    """

    shows: str
    instead: tuple[tuple[str, str], ...] = ()
    code: int = 0


@dataclass(frozen=True)
class Elsewhere:
    """Run by another test, FILE::NAME, or by a line of .ci/run."""

    test: str


@dataclass(frozen=True)
class NotHere:
    """Run by no test, and why."""

    reason: str


REGISTRY = NotHere("needs a package registry; `make venv` installs what it names, from setup.cfg")
MODULES = NotHere("a site's modules")
OUTPUT = "tests/faults/test_output.py"
SLURM_PAGES = "tests/slurm/test_pages.py"
SHRINK = "tests/faults/test_shrink.py::test_the_others_go_on"
WORD_BY_WORD = "tests/docs/test_tutorial.py::test_word_by_word"
MIGRATE = "tests/docs/test_migrate.py::test_both_sides_have_the_same_losses"
DATA_PAGE = "tests/faults/test_data_page.py::test_every_command_runs_as_written"
STRANGE_TEXT = "There are not enough slots available in the system to satisfy the 4 slots"

# What a page takes for granted.
BEFORE = {
    "README.md": [f"ln -s {sys.prefix} .venv"],
    "docs/howto/checkpoints.md": ["mpidp train jobs/digits.toml --train.epochs=1 --checkpoint.best=validation_loss"],
    "docs/howto/predict.md": ["mpidp train jobs/digits.toml --train.epochs=1"],
    "docs/howto/report.md": ["mpidp train jobs/digits.toml --train.epochs=1"] * 2,
    "docs/howto/doctor.md": [f"echo '{STRANGE_TEXT}' >slurm-train-77.out"],
}

CLONE = NotHere("the tests run in such a clone")
TABLE: dict[str, dict[str, Run | Elsewhere | NotHere]] = {
    "README.md": {
        "make demo": Run("Everything is in runs/digits.", (("make", "make -o .venv/installed"),)),
        "make test": Elsewhere(".ci/run::make test"),
        "make docs": Elsewhere(".ci/run::make docs"),
        "mpidp report runs/digits": Run("runs/digits/report.html: digits to step 368"),
        "mpidp train jobs/digits.toml --help": Run("--optimizer.lr {} 0.003"),
        "mpiexec -n 4 mpidp train jobs/digits.toml --train.epochs=30 --optimizer.lr=1e-3": Run(
            "Trained 46 steps on 4 ranks", (("epochs=30", "epochs=2"),)
        ),
        "mpiexec -n 3 mpidp train jobs/digits.toml --resume runs/digits": Run(
            "resumed from runs/digits/checkpoints/step_00000345: step 345 {} Trained 23 steps on 3 ranks",
            (("runs/digits", "runs/digits --train.epochs=16"),),  # the demo has ended
        ),
        "mpidp train jobs/digits.toml --dry-run --ranks 64": Run("64 ranks"),
        "mpidp data inspect data/digits.h5": Run("data/digits.h5"),
        "mpidp checkpoint verify runs/digits": Run("runs/digits/checkpoints/step_{}: whole"),
        "mpidp doctor data/digits.h5": Run("OK    data {} data/digits.h5: {} 0 FAIL"),
        "sbatch jobs/multi_node.sbatch jobs/digits.toml": Elsewhere(f"{SLURM_PAGES}::test_the_readme"),
        "mpidp submit jobs/digits.toml --nodes 2 --gpus-per-node 4 --time 4:00:00 --requeue --dry-run": Run(
            "#SBATCH --nodes=2 {} #SBATCH --gpus-per-node=4 {} #SBATCH --requeue {} srun -K --mpi=pmi2"
        ),
        "mpidp status runs/digits": Run("state: {} done; {} step: {} 368 of 368"),
        "module load ...; pip install '.[codecs]'": MODULES,
    },
    "docs/howto/checkpoints.md": {
        "mpidp predict --checkpoint best": Run("by runs/digits/checkpoints/", (("predict", "predict runs/digits"),)),
        "mpidp checkpoint list runs/digits": Run("step_00000023"),
        "mpidp checkpoint verify runs/digits": Run("step_00000023: whole"),
        "mpidp checkpoint export runs/digits": Run("model.pt: model of runs/digits/checkpoints/step_00000023"),
        "mpidp checkpoint export runs/digits --format safetensors --optimizer --output digits.safetensors": Run(
            "digits.safetensors: model and optimizer of runs/digits/checkpoints/step_00000023"
        ),
        "mpidp train RUN.toml --resume runs/<name>": Run(
            "resumed from runs/digits/checkpoints/step_00000023",
            (("RUN.toml", "jobs/digits.toml"), ("<name>", "digits --train.epochs=2")),
        ),
        "pip install safetensors": REGISTRY,
        "tests/faults/chaos_checkpoint.py --points 300 --flips 50 --seed S": Elsewhere(
            "tests/faults/test_checkpoint_faults.py::test_kills_and_damage_at_random_points"
        ),
    },
    "docs/tutorial/laptop.md": {
        "git clone <this repository> mpidp && cd mpidp": CLONE,
        "make venv": CLONE,
        "source .venv/bin/activate": CLONE,
    },
    "docs/tutorial/cluster.md": {
        "git clone <this repository> mpidp && cd mpidp": CLONE,
        "module load python openmpi": MODULES,
        "python3 -m venv .venv && source .venv/bin/activate": Run(
            "/new/bin/python", ((".venv", "new"), ("activate", "activate && command -v python"))
        ),
        "pip install '.[codecs]'": NotHere(
            "needs a package registry; tests/unit/test_package.py installs the wheel without one"
        ),
        "mpidp train jobs/digits.toml --dry-run --ranks 8": Elsewhere(f"{SLURM_PAGES}::test_ten_lines"),
        "srun --mpi=list": Elsewhere(f"{SLURM_PAGES}::test_ten_lines"),
        "mpidp submit jobs/digits.toml --nodes 2 --gpus-per-node 4 --time 1:00:00 --mpi pmix --requeue "
        '--setup "module load python openmpi" --dry-run': Elsewhere(f"{SLURM_PAGES}::test_ten_lines"),
        "mpidp submit ... (the same, without --dry-run)": Elsewhere(f"{SLURM_PAGES}::test_ten_lines"),
        "mpidp status": Elsewhere(f"{SLURM_PAGES}::test_ten_lines"),
        "tail -f slurm-digits-4711.out": Elsewhere(f"{SLURM_PAGES}::test_ten_lines"),
        "mpidp submit --dry-run": Run(
            "#SBATCH --ntasks-per-node=4", (("submit", "submit jobs/digits.toml --ranks-per-node 4"),)
        ),
        "make slurm": Elsewhere(".ci/run::CI=true make slurm"),
        "scancel --signal=USR2 JOB": Elsewhere("tests/slurm/test_submit.py::test_submitted_stopped_and_done"),
        "scancel --signal=USR2 4711_3.0": Elsewhere("tests/slurm/test_templates.py::test_array"),
        "touch runs/digits/STOP": Elsewhere("tests/faults/test_preemption.py::test_a_file_stops_the_run_once"),
        "srun -K": Elsewhere("tests/slurm/test_srun.py::test_the_exit_code_of_a_rank_that_fails"),
    },
    "docs/howto/data.md": {
        # That test takes the fenced ones from the page itself.
        **{
            command.text: Elsewhere(DATA_PAGE)
            for command in commands((ROOT / "docs/howto/data.md").read_text())
            if command.output or command.text.startswith("mpiexec")
        },
        "mpidp data COMMAND --help": Run("--shuffle-rows", (("COMMAND", "convert"),)),
        "pip install Pillow": REGISTRY,
        "pip install hdf5plugin": REGISTRY,
    },
    "docs/howto/doctor.md": {
        "mpidp doctor data/digits.h5": Run("OK    data {} data/digits.h5"),
        "mpiexec -n 4 mpidp doctor": Run("OK    launch {} started 4 ranks, 4 on this node; MPI has understood it"),
        "mpidp doctor --probe": Run("probe.copy {} probe.step {} probe.checkpoint"),
        "mpidp doctor --markdown": Run("### mpidp doctor {} | OK | `versions` |"),
        "mpidp doctor --json": Run('{"format": 1, "level": {} "ranks": [{'),
        "mpidp doctor --log slurm-train-77.out": Run("FAIL  text.slots", code=3),
        "srun --mpi=...": Elsewhere("tests/slurm/test_srun.py::test_they_do_not"),
        "mpidp doctor --log FILE": Run("FAIL  text.slots", (("FILE", "slurm-train-77.out"),), code=3),
    },
    "docs/howto/fault_tolerance.md": {"mpiexec --with-ft ulfm -n 4 mpidp train run.toml": Elsewhere(SHRINK)},
    "docs/howto/loops.md": {
        "mpidp train RUN.toml --dry-run --ranks 64": Run("64 ranks", (("RUN.toml", "jobs/digits.toml"),)),
    },
    "docs/howto/migrate.md": {
        "mpiexec -n 4 python train.py": Elsewhere(MIGRATE),
        "srun python train.py": NotHere("a script of the reader's, in Slurm; the job scripts are run there"),
    },
    "docs/reference/messages.md": {
        "mpidp data verify FILE": Run("sound", (("FILE", "data/digits.h5"),)),
        "pip install mpich": REGISTRY,
        "pip install hdf5plugin": REGISTRY,
    },
    "docs/reference/commands.md": {
        "mpidp COMMAND --help": Run("usage: mpidp submit", (("COMMAND", "submit"),)),
    },
    "docs/reference/run_file.md": {
        "mpidp train RUN.toml --print-config": Run("[checkpoint]", (("RUN.toml", "jobs/digits.toml"),)),
    },
    "docs/reference/loader.md": {
        "pip install imagecodecs": REGISTRY,
        "mpidp data inspect FILE": Run("data/digits.h5", (("FILE", "data/digits.h5"),)),
        "mpidp bench loader FILE": Run(
            "mpidp streams", (("FILE", "data/digits.h5 --samples 300 --repeats 1 --shuffles streams"),)
        ),
    },
    "docs/reference/logging.md": {
        "mpidp data inspect FILE | head -1": Elsewhere(f"{OUTPUT}::test_a_reader_that_goes_away"),
        "mpidp train ... | head -1": Elsewhere(f"{OUTPUT}::test_training_outlives_its_standard_output"),
    },
    "docs/howto/predict.md": {
        "mpidp predict runs/digits --data data/digits.h5 --output predictions.h5": Run(
            "prediction 1797 x 10, for data/digits.h5, by"
        ),
        "mpiexec -n 4 mpidp predict jobs/digits.toml --output on_4_ranks.h5": Run(
            "on_4_ranks.h5: prediction 1797 x 10"
        ),
    },
    "docs/howto/report.md": {
        "pip install matplotlib": REGISTRY,
        "mpidp report runs/digits": Run("runs/digits/report.html"),
        "mpidp report runs/digits runs/digits-2 --output both.html": Run(
            "both.html: digits to step {}, digits-2 to step"
        ),
    },
    "docs/explanation/security.md": {"mpidp train jobs/digits.toml --print-config": Run('name = "cnn"')},
    "docs/howto/sharded_optimizer.md": {
        "mpidp train jobs/digits.toml --dry-run --ranks 8 --optimizer.sharded=true": Run("optimizer state {} 37.4 KiB"),
    },
    "docs/explanation/structure.md": {"make lint": Elsewhere(".ci/run::make lint")},
    "docs/howto/trace.md": {
        "mpiexec -n 4 mpidp train jobs/digits.toml --log.trace_steps=20": Run(
            "trace of 20 steps", (("digits.toml", "digits.toml --train.epochs=2"),)
        ),
    },
}

for page in TUTORIAL:
    typed = {command.text: Elsewhere(WORD_BY_WORD) for command in commands((ROOT / page).read_text())}
    TABLE[page] = typed | {text: how for text, how in TABLE.get(page, {}).items() if text in typed}
