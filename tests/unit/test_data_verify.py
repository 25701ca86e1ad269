"""`mpidp data verify` on one rank: every fault that is in a file is named with its place, and none that is not."""

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from bad_data import CHUNK_ROWS, ROWS, damage, write_bad_values, write_sound
from data_files import run
from hypothesis import given
from hypothesis import strategies as st

from mpidp.tools.data.scan import Work, describe_work, missing_pieces
from mpidp.tools.table import Ticker


def report(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> dict[str, Any]:
    capsys.readouterr()
    assert run("verify", *words, "--json") == code
    (file,) = json.loads(capsys.readouterr().out)["files"]
    return dict(file)


def test_a_sound_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sound(tmp_path / "in.h5")
    assert run("verify", path) == 0
    assert capsys.readouterr().out == f"{path}: 6 datasets, 44 chunks or ranges, 31.5 KiB read: sound\n"
    found = report(capsys, path, code=0)
    assert (found["findings"], found["num_findings"], found["num_pieces"]) == ([], 0, 44)
    expected_bytes = ROWS * 6 * 4 + ROWS * 8 + 2 * 8 + 8 + 10 * 20
    assert found["read_bytes"] == expected_bytes


def test_damaged_chunks_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checksums: it goes on after the first; rows, chunk and place in the file are those of the damage."""
    path = damage(write_sound(tmp_path / "in.h5"), [5, 30, 39])
    found = report(capsys, path, code=1)
    assert [(f["kind"], f["dataset"], f["rows"], f["chunk"]) for f in found["findings"]] == [
        ("unreadable", "x", [100, 149], [2, 1]),
        ("unreadable", "x", [750, 799], [15, 0]),
        ("unreadable", "x", [950, 999], [19, 1]),
    ]
    with h5py.File(path) as file:
        info = file["x"].id.get_chunk_info(5)
    assert f"({info.size} bytes at {info.byte_offset} of the file)" in found["findings"][0]["text"]
    assert run("verify", path) == 1
    text = capsys.readouterr().out
    assert "3 findings" in text and '\n  dataset "x", rows 100 to 149, chunk (2, 1): cannot be decoded' in text


def test_beyond_the_limit_findings_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(write_sound(tmp_path / "in.h5"), list(range(10, 20)))
    found = report(capsys, path, "--limit=3", code=1)
    assert (len(found["findings"]), found["num_findings"]) == (3, 10)
    assert run("verify", path, "--limit=3") == 1
    assert "10 findings" in (text := capsys.readouterr().out) and "and 7 more" in text


def test_values_and_holes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Non-finite values are counted for each dataset and member, with the first; holes are runs of chunks."""
    path = write_bad_values(tmp_path / "in.h5")
    found = report(capsys, path, code=1)
    assert {(f["kind"], f["dataset"], tuple(f["rows"])) for f in found["findings"]} == {
        ("non-finite", "x", (77, 77)),
        ("non-finite", "compound", (7, 7)),
        ("uint64", "compound", (3, 3)),
        ("missing", "holes", (5 * CHUNK_ROWS, 17 * CHUNK_ROWS - 1)),
        ("missing", "unwritten", (0, 3)),
    }
    texts = {(f["kind"], f["dataset"]): f["text"] for f in found["findings"]}
    assert texts["non-finite", "x"] == "3 values are not finite; the first is nan at [77, 2]"
    assert texts["non-finite", "compound"].startswith(
        '1 of member "a" values are not finite; the first is nan at [7, 1]'
    )
    assert texts["uint64", "compound"].startswith('2 of member "b" values are larger than int64')
    assert texts["missing", "holes"].startswith("12 chunks were never written")
    assert found["num_findings"] == 5


def test_what_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HDF5 reads a missing source as fill values; a link to nothing is only noticed by who follows it."""
    monkeypatch.chdir(tmp_path)
    with h5py.File(tmp_path / "there.h5", "w") as there:
        there["x"] = np.arange(4)
    layout = h5py.VirtualLayout((12,), "i8")
    layout[:4] = h5py.VirtualSource("there.h5", "x", (4,))
    layout[4:8] = h5py.VirtualSource("gone.h5", "x", (4,))
    half = h5py.VirtualLayout((8,), "i8")
    half[:4] = h5py.VirtualSource("there.h5", "x", (4,))
    whole = h5py.VirtualLayout((4,), "i8")
    whole[:] = h5py.VirtualSource("there.h5", "x", (4,))
    inner = h5py.VirtualLayout((4,), "i8")
    inner[:] = h5py.VirtualSource(".", "gone", (4,))
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, each in {"broken": layout, "half": half, "whole": whole, "inner": inner}.items():
            file.create_virtual_dataset(name, each)
        file["soft"] = h5py.SoftLink("/nowhere")
        file["external"] = h5py.ExternalLink("gone.h5", "/x")
        file["good"] = h5py.ExternalLink("there.h5", "/x")
        file.create_dataset("outside", (4,), "i8", external=[("values.raw", 0, 32)])
    (tmp_path / "values.raw").write_bytes(bytes(16))
    found = report(capsys, tmp_path / "in.h5", code=1)
    assert {f["dataset"]: f["text"].partition(" is missing")[0] for f in found["findings"]} == {
        "broken": "its source file gone.h5",
        "half": "4 of its 8 values",
        "inner": 'its source "gone"',
        "soft": 'is a link to "/nowhere", which is not there',
        "external": 'is a link to "/x" in gone.h5, which is not there',
        "outside": "values.raw, where its values lie, holds 16 bytes only: the rest",
    }


def test_damaged_tables_of_a_dataset_do_not_keep_others_from_being_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sound(tmp_path / "in.h5")
    data = path.read_bytes()
    # The node of the B-tree that knows the chunks of x: type 1, which chunks have.
    place = data.index(b"TREE\x01")
    path.write_bytes(data[:place] + b"EERT" + data[place + 4 :])
    found = report(capsys, path, code=1)
    assert [(f["kind"], f["dataset"]) for f in found["findings"]] == [("unreadable", "x")]
    assert found["num_datasets"] == 5 and found["read_bytes"] == ROWS * 8 + 2 * 8 + 8 + 10 * 20


@pytest.mark.parametrize("kind", ["truncated", "text", "missing"])
def test_files_that_cannot_be_opened_do_not_keep_others_from_being_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Behaviour 29."""
    good, bad = write_sound(tmp_path / "good.h5"), tmp_path / "bad.h5"
    if kind == "truncated":
        bad.write_bytes(good.read_bytes()[:-500])
    elif kind == "text":
        bad.write_text("hello")
    assert run("verify", bad, good) == 1
    text = capsys.readouterr().out
    assert f"{bad}: 0 datasets, 0 chunks or ranges, 0 B read: 1 finding\n  " in text and text.endswith("sound\n")
    assert {"truncated": "500 bytes are missing", "text": "not an HDF5 file", "missing": "no such file"}[kind] in text


def test_an_unknown_filter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((10,))
        properties.set_filter(32768, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((20,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, properties)
    found = report(capsys, tmp_path / "in.h5", code=1)
    assert "filter 32768" in found["findings"][0]["text"]


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), heights=st.lists(st.integers(1, 4), min_size=3))
def test_pieces_cover_every_value_once(shape: list[int], heights: list[int]) -> None:
    work = Work("x", tuple(shape), tuple(heights[: len(shape)]), True, 1 << 21, np.zeros(0, np.int64))
    seen = np.zeros(shape, int)
    for block in work.blocks():
        for number in block:
            seen[work.slices(number)] += 1
    assert (seen == 1).all()


@given(written=st.sets(st.integers(0, 5)))
def test_missing_chunks_are_those_that_were_not_written(written: set[int]) -> None:
    with h5py.File("missing", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", (5, 3), "i4", chunks=(2, 2))
        for number in written:
            dataset[2 * (number // 2) : 2 * (number // 2) + 1, 2 * (number % 2)] = 1
        assert missing_pieces(dataset).tolist() == sorted(set(range(6)) - written)
        assert describe_work(dataset, "x").grid == (3, 2)


def test_a_shrunk_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), maxshape=(None,)).resize((35,))
    assert report(capsys, tmp_path / "in.h5", code=0)["num_pieces"] == 4


def test_lines_tell_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    ticker = Ticker("verifying", 4 << 20, interval_s=0)
    ticker.add(0)
    ticker.add(1 << 20)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("mpidp: verifying: 1.0 MiB of 4.0 MiB, ")
    Ticker("verifying", 4, speaks=False, interval_s=0).add(1)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sound(tmp_path / "in.h5")
    path.chmod(0)
    assert "permission denied" in report(capsys, path, code=1)["findings"][0]["text"]


def test_linked_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a link leads to in another file is read and counted, and damage to it found."""
    linked = write_sound(tmp_path / "linked.h5")
    with h5py.File(tmp_path / "master.h5", "w") as file:
        file["entry/frames"], file["all"] = h5py.ExternalLink("linked.h5", "/x"), h5py.ExternalLink("linked.h5", "/")
    assert report(capsys, tmp_path / "master.h5", code=0)["num_datasets"] == 6
    damage(linked, [5])
    (finding,) = report(capsys, tmp_path / "master.h5", code=1)["findings"]
    assert (finding["kind"], finding["rows"]) == ("unreadable", [100, 149])


def test_values_that_are_only_decoded_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a type without NumPy equivalent: damage is found, and soundness of the values is not claimed."""
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((10,))
        properties.set_fletcher32()
        made = h5py.h5d.create(file.id, b"when", h5py.h5t.UNIX_D64LE, h5py.h5s.create_simple((20,)), properties)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(160, dtype="u1"), mtype=made.get_type())
        place = made.get_chunk_info(1).byte_offset
    assert run("verify", path) == 0
    assert "(values decoded, but not looked at: when (H5T_TIME)): sound" in capsys.readouterr().out
    with open(path, "r+b") as raw:
        raw.seek(place)
        raw.write(b"damage")
    assert report(capsys, path, code=1)["findings"][0]["rows"] == [10, 19]


def test_damaged_attributes_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        file.create_group("group").attrs["text"] = "a string of variable length, in a heap"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"GCOL", b"LOCG"))
    (finding,) = report(capsys, path, code=1)["findings"]
    assert finding["dataset"] == "group" and 'attribute "text" cannot be read' in finding["text"]


def test_what_programs_leave_unwritten_is_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("bnds", (2,), ">f4").make_scale("This is a netCDF dimension but not a netCDF variable.")
        file.create_group("_i_table").attrs["CLASS"] = np.bytes_("TINDEX")
        file.create_dataset("_i_table/sorted", (20,), "f4", chunks=(10,))
    assert report(capsys, tmp_path / "in.h5", code=0)["num_findings"] == 0
