"""Lines on standard error come in; what means nothing is dropped, everything else passes."""

import os

import pytest

from mpidp.world.library import without_harmless, without_noise

NOISE = b"[host:1] /openmpi/ompi/mca/osc/ucx/osc_ucx_component.c:375  Error: priority set failed \n \n"


def test_only_harmless_lines_go() -> None:
    text = b"first\n" + NOISE + b"second\n\nthird\n"
    assert without_harmless(text) == b"first\nsecond\n\nthird\n"


def test_what_c_code_writes_is_held_back_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise():
        os.write(2, NOISE + b"a real error\n")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "a real error\nafterwards\n"


def test_an_exception_passes_with_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError), without_noise():
        os.write(2, b"why\n")
        raise OSError
    assert capfd.readouterr().err == "why\n"
