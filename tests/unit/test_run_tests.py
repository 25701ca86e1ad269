"""The test runner: a test passed only if it did on every rank, and a run that dies is a failure."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "run_tests.py"
SPEC = importlib.util.spec_from_file_location("run_tests", RUNNER)
assert SPEC is not None and SPEC.loader is not None
run_tests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run_tests)

PASSED, FAILED, SKIPPED = "", "<failure/>", "<skipped/>"


def write(folder: Path, rank: int, **results: str) -> None:
    cases = "".join(f'<testcase classname="t" name="{name}">{tag}</testcase>' for name, tag in results.items())
    (folder / f"rank_{rank}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")


def test_the_worst_rank_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, a=PASSED, b=PASSED, c=SKIPPED, d=SKIPPED, e="<error/>")
    write(tmp_path, 1, a=PASSED, b=FAILED, c=SKIPPED, d=PASSED, e=PASSED)
    assert run_tests.outcomes(tmp_path, 2) == Counter(passed=2, failed=2, skipped=1)


def test_a_rank_without_results_is_a_failure(tmp_path: Path) -> None:
    write(tmp_path, 0, a=PASSED)
    assert run_tests.outcomes(tmp_path, 3) == Counter(passed=1, failed=1)


def test_the_line_is_plain() -> None:
    assert run_tests.line(Counter(passed=3)) == "3 passed, 0 failed, 0 skipped"


@pytest.mark.job
@pytest.mark.parametrize(
    ("program", "timeout_s", "found"),
    [
        ("", 60, ""),
        ("raise SystemExit(3)", 60, "exit code 3"),
        ("import time; time.sleep(600)", 0.5, "killed: it did not end within 0.5 s"),
    ],
)
def test_a_run_that_fails_or_hangs_is_reported(program: str, timeout_s: float, found: str) -> None:
    assert run_tests.execute([sys.executable, "-c", program], {}, timeout_s) == found
