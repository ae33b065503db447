"""Which card is taken, and the sentence that says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.cuda import Driver, unproven
from kvd.errors import ConfigError, CudaUnavailable
from kvd.memory.device import choose_device
from tests.fakecuda.machine import P40, RTX_3050, FakeMachine


def no_driver() -> Driver:
    return Driver("/nowhere/libcuda.so.1")


def test_auto_takes_the_most_memory_that_drives_no_display(driver: Driver):
    choice = choose_device("auto", lambda: driver)
    assert choice.device is driver.devices[0]
    assert choice.reason == (
        f"blocks live on cuda:0 (Tesla P40, 64 MiB, {P40.uuid}), the most memory that drives no display; "
        f"passed over cuda:1 NVIDIA GeForce RTX 3050 (it drives a display)"
    )


def test_auto_without_a_driver_is_host_memory():
    choice = choose_device("auto", no_driver)
    assert choice.device is None
    assert choice.reason.startswith("blocks live in host memory: no NVIDIA driver here: /nowhere/libcuda.so.1")
    assert "\n" not in choice.reason


def test_auto_does_not_take_the_only_card_when_it_drives_the_display(tmp_path, monkeypatch):
    for name, value in FakeMachine(tmp_path, RTX_3050).environ.items():
        monkeypatch.setenv(name, value)
    choice = choose_device("auto")
    assert choice.device is None
    assert "RTX 3050 (it drives a display) is not taken unless device names it" in choice.reason


def test_cpu_asks_no_driver():
    assert choose_device("cpu", no_driver).device is None


@pytest.mark.parametrize(
    ("wanted", "ordinal"),
    [("cuda:0", 0), ("cuda:1", 1), (f"cuda:{RTX_3050.uuid}", 1), ("cuda:GPU-a0b1", 0), ("cuda:b7000000", 1)],
)
def test_a_card_is_named_by_number_or_by_uuid(driver: Driver, wanted, ordinal):
    choice = choose_device(wanted, lambda: driver)
    assert choice.device is driver.devices[ordinal]
    assert choice.reason.endswith("as configured")


def test_a_number_means_what_this_process_sees(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    choice = choose_device("cuda:0")
    assert choice.device is not None
    assert choice.device.uuid == RTX_3050.uuid


@pytest.mark.parametrize("wanted", ["cuda:2", "cuda:GPU-ffff"])
def test_a_card_that_is_not_there_is_refused_and_the_others_are_named(driver: Driver, wanted):
    with pytest.raises(CudaUnavailable, match=r"Tesla P40.*RTX 3050"):
        choose_device(wanted, lambda: driver)


def test_a_named_card_without_a_driver_is_refused_in_one_line_with_its_exit_code():
    with pytest.raises(CudaUnavailable, match='device "cuda:0" was asked for, but no NVIDIA driver') as caught:
        choose_device("cuda:0", no_driver)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 11


@pytest.mark.parametrize("wanted", ["", "gpu", "cuda", "cuda:", "0"])
def test_another_word_is_a_wrong_configuration(wanted):
    with pytest.raises(ConfigError, match="cuda:GPU"):
        choose_device(wanted, no_driver)


def test_kinds_of_cards_that_were_never_seen_to_work_are_refused(driver: Driver, tmp_path):
    p40 = driver.devices[0]
    (tmp_path / "sys/kernel").mkdir(parents=True)
    release = tmp_path / "sys/kernel/osrelease"
    release.write_text("6.1.0-generic\n")
    assert unproven(p40, {}, tmp_path) is None
    assert "MIG" in str(unproven(replace(p40, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"), {}, tmp_path))
    assert "integrated" in str(unproven(replace(p40, is_integrated=True), {}, tmp_path))
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps/control").touch()
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")}
    assert "MPS" in str(unproven(p40, environ, tmp_path))
    assert unproven(replace(p40, compute_capability=(7, 0)), environ, tmp_path) is None
    release.write_text("5.15.90.1-microsoft-standard-WSL2\n")
    assert "WSL2" in str(unproven(p40, {}, tmp_path))


def test_a_card_for_one_process_only_is_refused(driver: Driver, monkeypatch):
    monkeypatch.setattr(driver, "devices", (replace(driver.devices[0], compute_mode=3),))
    with pytest.raises(CudaUnavailable, match="only one process"):
        choose_device("cuda:0", lambda: driver)
    assert choose_device("auto", lambda: driver).device is None
