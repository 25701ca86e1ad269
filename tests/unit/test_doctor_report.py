"""Findings become text, Markdown and JSON; texts that jobs print are explained; behaviour 46."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doctor_facts import rank_facts

from mpidp.tools.doctor.finding import (
    Finding,
    Level,
    Report,
    fail,
    merge,
    ok,
    to_json,
    to_markdown,
    to_text,
    warn,
    worst,
)
from mpidp.tools.doctor.known_texts import KNOWN, read_log

ROOT = Path(__file__).parents[2]
# What people saw: one line or more of it, and what doctor makes of it.
SEEN = {
    "text.no_pmi": "OMPI was not built with SLURM's PMI support and therefore cannot execute.",
    "text.no_pmix": "PMIx_Init failed for the following reason: UNREACHABLE",
    "text.two_pmis": "Found both env vars PMI_SIZE and PMIX_NAMESPACE",
    "text.singleton": "[unset]: PMII_singinit: execv failed: No such file or directory",
    "text.psec": "[node1:7] PMIX ERROR: NOT-FOUND in file psec_munge.c at line 134",
    "text.gds": "[node1:7] PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c at line 168",
    "text.pmi2_init": "PMI2 init failed: 1",
    "text.pmi2_value": "slurmstepd: error: mpi/pmi2: value not properly terminated in client request",
    "text.cuda_ipc": "The call to cuIpcOpenMemHandle failed. This is an unrecoverable error",
    "text.gpu_segfault": "[node1:7] Signal code: Invalid permissions (2)",
    "text.gtl": "MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked",
    "text.cma": "[node1:7] Read -1, expected 65536, errno = 1",
    "text.shm": "It appears as if there is not enough space for /dev/shm/x (the shared-memory backing file).",
    "text.slots": "There are not enough slots available in the system to satisfy the 4 slots",
    "text.root": "mpiexec has detected an attempt to run as root.",
    "text.fork": 'A process has executed an operation involving a call to the "fork()" system call',
    "text.component": "mca_base_component_repository_open: unable to open mca_oob_ud: librdmacm.so.1: not found",
    "text.osc_ucx": "[node1:7] osc_ucx_component.c:369  Error: OSC UCX component priority set inside component query",
    "text.no_fabric": "WARNING: There was an error initializing an OpenFabrics device.",
    "text.two_ucx": "symbol lookup error: libucp.so.0: undefined symbol: ucm_set_global_opts",
    "text.no_mpi": "RuntimeError: cannot load MPI library",
    "text.locks": "OSError: Unable to open file (unable to lock file, errno = 524)",
    "text.locked_memory": "ibv_reg_mr(address=0x7f, length=4096) failed: Cannot allocate memory",
    "text.scontrol": "bash: scontrol: command not found",
    "text.out_of_memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
    "text.torch_zip": "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    "text.port": "RuntimeError: The server socket has failed to listen: EADDRINUSE",
    "text.truncated": "OSError: Unable to open file (truncated file: eof = 745, stored_eof = 749)",
    "text.filter": "OSError: Can't read data (can't open directory: /usr/local/hdf5/lib/plugin)",
}


def test_every_known_text_is_held_by_one_that_somebody_saw() -> None:
    assert [known.code for known in KNOWN] == list(SEEN)


@pytest.mark.parametrize("code", SEEN)
def test_a_text_is_explained_and_taken_for_no_other(code: str) -> None:
    findings = read_log(f"step 1 loss 0.3\n{SEEN[code]}\n{SEEN[code]}\n")
    assert [finding.code for finding in findings] == [code]
    assert findings[0].text.startswith("line 2, ")
    assert bool(findings[0].fix) is (findings[0].level is not Level.OK)
    assert ("safe to ignore" in findings[0].text) is (findings[0].level is Level.OK)


def test_a_log_of_a_healthy_job() -> None:
    (found,) = read_log("mpidp 0.1.0: 4 ranks on 1 node, device cpu\nepoch 1/15 held out: loss 0.2\n")
    assert found.level is Level.OK and "none of" in found.text


def test_the_worst_counts() -> None:
    assert worst([]) is Level.OK
    assert worst([ok("a", "")]) is Level.OK
    assert worst([fail("a", "", ""), warn("b", "", ""), ok("c", "")]) is Level.FAIL
    assert worst([warn("b", "", ""), ok("c", "")]) is Level.WARN


def test_what_many_ranks_found_is_said_once() -> None:
    """And a fault of some of them names the first, and how many more."""
    slow = warn("cores", "one core", "more")
    by_rank = [[ok("a", "1 GiB")], [ok("a", "2 GiB"), slow], [ok("a", "3 GiB"), slow]]
    places = ["rank 0 on x", "rank 1 on x", "rank 2 on y"]
    merged = merge(by_rank, places)
    assert [(finding.code, finding.text, finding.where) for finding in merged] == [
        ("a", "1 GiB", ""),
        ("cores", "one core", "rank 1 on x and 1 more"),
    ]
    assert merge([[slow], [slow]], places[:2])[0].where == ""
    assert merge([[slow], [ok("a", "")]], places[:2])[0].where == "rank 0 on x"


REPORT = Report([ok("a", "fine"), Finding(Level.FAIL, "b", "broken | <x>", "fix it", "rank 1 on y")], [rank_facts()])


def test_text() -> None:
    assert to_text(REPORT).splitlines() == [
        "OK    a                    fine",
        "FAIL  b                    broken | <x> [rank 1 on y]",
        "                           fix: fix it",
        "1 FAIL, 0 WARN, 1 OK",
    ]


def test_markdown_is_a_table_whatever_is_in_the_text() -> None:
    lines = to_markdown(REPORT).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert "| FAIL | `b` | broken \\| &lt;x> (rank 1 on y) | fix it |" in rows
    folded = "\n".join(lines)
    assert json.loads(folded.split("```json\n")[1].split("\n```")[0])["ranks"][0]["system"]["host"] == "node1"


def test_json() -> None:
    found = json.loads(to_json(REPORT))
    assert (found["format"], found["level"], found["measured"]) == (1, "FAIL", None)
    assert found["findings"][0] == {"level": "OK", "code": "a", "text": "fine", "fix": "", "where": ""}
    assert found["ranks"][0]["mpi"]["mapped"]["mpi"] == ["/opt/mpi/lib/libmpi.so.12"]


def test_the_page_names_every_finding_and_no_other() -> None:
    """Behaviour 50: docs/howto/doctor.md lists what may be found."""
    tools = ROOT / "mpidp" / "tools" / "doctor"
    sources = [path.read_text() for path in tools.glob("*.py")]
    pattern = r'\b(?:ok|warn|fail|Known)\(\s*"([a-z0-9_.]+)"'
    codes = {code for source in sources for code in re.findall(pattern, source)}
    named = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", (ROOT / "docs/howto/doctor.md").read_text(), re.MULTILINE))
    assert len(codes) > 70
    assert named == codes
