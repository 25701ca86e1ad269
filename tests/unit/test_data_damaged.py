"""`mpidp data inspect`, `verify` and `convert` on files of each HDF5 format in which bytes were changed."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from bad_data import write_one_bad_object, write_wild_shape
from data_files import error_of, run

import mpidp

FORMATS = {"earliest": ("earliest", "latest"), "v108": ("v108", "latest"), "latest": ("latest", "latest")}
FILES_OF_A_FORMAT = 30
# In a child, since HDF5 itself crashes of some damage: a traceback of the faulthandler would then tell.
CHILD = """
import faulthandler, pathlib, random, sys, traceback
from mpidp.cli import main
faulthandler.dump_traceback_later(60, exit=True)
sound, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
data, damaged, target = sound.read_bytes(), str(sound.with_name("damaged.h5")), str(sound.with_name("out.h5"))
for number in range(count):
    draw = random.Random(number)
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    pathlib.Path(damaged).write_bytes(changed)
    for words in (["inspect", damaged], ["verify", damaged], ["convert", damaged, target, "--overwrite"]):
        print("==", number, words[0], flush=True)
        print("==", number, words[0], file=sys.stderr, flush=True)
        try:
            print("code", main(["data", *words]))
        except BaseException:
            traceback.print_exc()
"""


def write_everything(path: Path, versions: tuple[str, str]) -> None:
    """A file with objects of many kinds."""
    with h5py.File(path, "w", libver=versions) as file:
        x = np.random.default_rng(0).normal(size=(60, 4)).astype("f4")
        options = {"chunks": (8, 4), "compression": "gzip", "shuffle": True, "fletcher32": True}
        file.create_dataset("x", data=x, **options)
        file.create_dataset("group/growing", data=np.arange(60), maxshape=(None,), chunks=(16,))
        file["group/contiguous"] = np.arange(60.0)
        file["group"].attrs.update({f"attribute {number}": number for number in range(12)})
        file["table"] = np.zeros(10, [("a", "f4"), ("b", "i2", 3)])
        file["words"], file["kind"] = ["one", "two"], np.dtype([("a", "f4")])
        file["soft"], file["alias"] = h5py.SoftLink("/x"), file["x"]
        file["time"] = np.arange(60)
        file["time"].make_scale("time")
        file["x"].dims[0].attach_scale(file["time"])
        layout = h5py.VirtualLayout((60,), "f8")
        layout[:] = h5py.VirtualSource(".", "group/contiguous", (60,))
        file.create_virtual_dataset("virtual", layout)


@pytest.mark.job
@pytest.mark.parametrize("version", FORMATS)
def test_no_damage_ends_in_a_traceback(tmp_path: Path, version: str) -> None:
    """Behaviour 57: exit codes 0 and 1 only, no hang, and the file is named where the code is 1."""
    write_everything(tmp_path / "sound.h5", FORMATS[version])
    environment = {**os.environ, "PYTHONPATH": str(Path(mpidp.__file__).parents[1])}
    words = [sys.executable, "-c", CHILD, tmp_path / "sound.h5", str(FILES_OF_A_FORMAT)]
    child = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert child.returncode == 0 and "Traceback" not in child.stderr, child.stderr[-3000:]
    said = [part for part in child.stdout.split("== ") if part]
    complained = [part for part in child.stderr.split("== ") if part]
    assert len(said) == len(complained) == 3 * FILES_OF_A_FORMAT
    codes = [part.split()[-1] for part in said]
    assert set(codes) == {"0", "1"}
    for code, out, error in zip(codes, said, complained, strict=True):
        assert code == "0" or str(tmp_path / "damaged.h5") in out + error, out + error


def test_damage_to_one_object_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 57: the dataset is named, what is beside it is described, and can be converted by its name."""
    path = write_one_bad_object(tmp_path / "in.h5")
    for command in ("inspect", "verify"):
        capsys.readouterr()
        assert run(command, path) == 1
        said = capsys.readouterr().out
        assert '"bad"' in said and ("good" in said or "1 datasets, 1 chunks or ranges, 160 B read" in said)
    assert '"bad" cannot be opened' in error_of(capsys, "convert", path, tmp_path / "out.h5", code=1)
    assert run("convert", path, tmp_path / "out.h5", "--fields=good") == 0


def test_shapes_that_no_file_can_hold_end_no_loop_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 56: the loop over chunks is bounded by what is there."""
    assert run("verify", write_wild_shape(tmp_path / "in.h5")) == 1
    assert "is damaged, and was not read: its shape" in capsys.readouterr().out
