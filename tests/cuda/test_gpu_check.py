"""tools/gpu_check.py against the fake driver: it passes, notices what is wrong, says when there is nothing to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.fakecuda.machine import P40, RTX_3050, Card, FakeMachine
from tests.support.processes import ROOT
from tools import gpu_check as gpu_check_tool
from tools.gpu_checks.torch_code import what_to_install

ROOMY_P40 = Card(P40.name, P40.uuid, 512, P40.compute_capability)


def gpu_check(**environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/gpu_check.py")],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_every_row_is_right_on_the_fake_driver(tmp_path):
    done = gpu_check(**FakeMachine(tmp_path, ROOMY_P40, RTX_3050).environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong, 0 differ from the fake; " in done.stdout
    for kind in ("facts", "sharing", "torch", "codes", "rounds", "speed", "latency", "deaths"):
        assert f"\n{kind} " in f"\n{done.stdout}"


def test_a_driver_that_does_not_open_handles_is_noticed(tmp_path):
    machine = FakeMachine(tmp_path, ROOMY_P40, RTX_3050)
    done = gpu_check(**machine.environ, KVD_FAKECUDA_FAIL="cuIpcOpenMemHandle_v2:*=999")
    assert done.returncode == 1
    assert "sharing  stopped" in done.stdout
    assert "CudaImportRefused" in done.stdout
    assert "open of a dead owner's handle" not in done.stdout


def test_a_driver_as_a_real_one_may_be_stops_no_check(tmp_path):
    machine = FakeMachine(tmp_path, ROOMY_P40, RTX_3050)
    # Memory that the CPU cannot touch, as that of a real card, and a handle that is opened once only.
    done = gpu_check(**machine.environ, KVD_FAKECUDA_FAIL="cuPointerGetAttribute:*=1,cuIpcOpenMemHandle_v2:2=208")
    refused = next(line for line in done.stdout.splitlines() if "a build that cannot see the card is refused" in line)
    assert refused.split()[:2] == ["torch", "a"]
    assert " ok " in refused
    second = next(line for line in done.stdout.splitlines() if "a second open gives" in line)
    assert second.endswith("differs  208, the fake says the same address")
    assert "torch    stopped" not in done.stdout
    assert "codes    stopped" not in done.stdout


def test_an_error_that_nobody_expected_leaves_the_other_rows(machine, monkeypatch, capsys):
    def check(_bench):
        yield gpu_check_tool.Row("first", "went well", gpu_check_tool.Verdict.RIGHT)
        raise RuntimeError("CUDA error: no kernel image is available")

    clock = SimpleNamespace(SIGALRM=signal.SIGALRM, signal=lambda *_: None, alarm=lambda _: None)
    monkeypatch.setattr(gpu_check_tool, "signal", clock)
    monkeypatch.setattr(gpu_check_tool, "CHECKS", (("one", check), ("two", check)))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cuda:0"])
    assert gpu_check_tool.main() == 1
    said = capsys.readouterr().out
    assert said.count("went well") == 2
    assert said.count("RuntimeError: CUDA error: no kernel image") == 2


@pytest.mark.parametrize(
    ("arches", "capability", "wanted"),
    [
        (["sm_75", "sm_80", "sm_90", "sm_120"], (6, 1), "'torch<2.15' --index-url URL (that of CUDA 12.6"),
        (["sm_50", "sm_60", "sm_70"], (6, 1), None),
        (["sm_61"], (6, 1), None),
        ([], (6, 1), "'torch<2.15' "),
        (["sm_50", "sm_60"], (8, 6), "install --force-reinstall torch --index-url URL"),
        (["sm_80"], (8, 6), None),
    ],
)
def test_a_torch_without_code_for_the_card_is_told_what_to_install(arches, capability, wanted):
    advice = what_to_install("2.13.0+cu130", arches, capability)
    if wanted is None:
        assert advice is None
    else:
        assert wanted in advice
        assert advice.startswith(f"torch 2.13.0+cu130 has none for sm_{capability[0]}{capability[1]}: ")
        assert "\n" not in advice


def test_without_a_card_one_line_says_so():
    done = gpu_check(KVD_LIBCUDA="/nowhere/libcuda.so.1")
    assert done.returncode == 11
    assert done.stdout == ""
    assert done.stderr.startswith("gpu-check: nothing to check, blocks live in host memory: no NVIDIA driver here")
    assert done.stderr.count("\n") == 1
