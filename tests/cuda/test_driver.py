"""The binding: typed errors in the driver's words, threads and forks handled, nothing loaded unasked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from kvd.cuda import Context, Driver, address_of
from kvd.cuda.driver import has_monitor
from kvd.cuda.library import SIGNATURES
from kvd.errors import (
    CudaDeviceLost,
    CudaError,
    CudaForked,
    CudaMisuse,
    CudaOutOfMemory,
    CudaUnavailable,
)
from tests.cuda.conftest import Start
from tests.fakecuda.machine import MIB, P40, RTX_3050, FakeMachine
from tests.support.processes import ROOT


def test_importing_loads_no_driver():
    program = "import kvd.cuda, kvd_client; print('libcuda' in open('/proc/self/maps').read())"
    environ = {**os.environ, "KVD_LIBCUDA": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("library", ["/nowhere/libcuda.so.1", "libc.so.6"])
def test_without_a_driver_one_sentence_says_so(monkeypatch, library):
    monkeypatch.setenv("KVD_LIBCUDA", library)
    with pytest.raises(CudaUnavailable, match=r"no NVIDIA driver|is no NVIDIA driver") as caught:
        Driver()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 11


def test_a_driver_that_sees_no_card_says_so(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CudaUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        Driver()


def test_what_the_driver_says_of_its_cards(driver: Driver):
    p40, display_card = driver.devices
    assert (p40.name, p40.uuid, p40.total_nbytes) == ("Tesla P40", P40.uuid, 64 * MIB)
    assert (p40.compute_capability, p40.drives_display, p40.has_ecc) == ((6, 1), False, True)
    assert (display_card.compute_capability, display_card.drives_display) == ((8, 6), True)
    assert driver.find(RTX_3050.uuid) is display_card
    assert driver.find("GPU-none") is None


def test_a_monitor_that_is_plugged_in_counts_as_a_display(tmp_path):
    connector = tmp_path / "0000:01:00.0/drm/card1/card1-DP-1"
    connector.mkdir(parents=True)
    for word, seen in (("disconnected", False), ("connected", True)):
        (connector / "status").write_text(word + "\n")
        assert has_monitor("0000:01:00.0", tmp_path) is seen
    assert not has_monitor("0000:02:00.0", tmp_path)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [P40.uuid]),
        ("1", [RTX_3050.uuid]),
        ("1,0", [RTX_3050.uuid, P40.uuid]),
        (RTX_3050.uuid, [RTX_3050.uuid]),
        ("GPU-a0b1", [P40.uuid]),
        ("0,7,1", [P40.uuid]),
    ],
)
def test_visible_devices_renumber_but_uuids_stay(start: Start, visible, expected):
    assert start(CUDA_VISIBLE_DEVICES=visible).cards() == expected


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        (1, CudaMisuse, "CUDA_ERROR_INVALID_VALUE (invalid argument)"),
        (2, CudaOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"),
        (3, CudaUnavailable, "CUDA_ERROR_NOT_INITIALIZED (initialization error)"),
        (201, CudaMisuse, "CUDA_ERROR_INVALID_CONTEXT (invalid device context)"),
        (700, CudaDeviceLost, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (999, CudaError, "CUDA_ERROR_UNKNOWN (unknown error)"),
        (4711, CudaError, "result 4711"),
    ],
)
def test_every_return_code_is_a_typed_error_in_the_drivers_words(machine: FakeMachine, p40: Context, code, kind, name):
    machine.fail(f"cuMemAlloc_v2:1={code}")
    with pytest.raises(kind) as caught:
        p40.allocate(MIB)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"cuMemAlloc_v2: {name}")
    assert (caught.value.call, caught.value.result) == ("cuMemAlloc_v2", code)


def test_a_lost_card_is_not_asked_again(machine: FakeMachine, p40: Context):
    address = p40.allocate(2 * MIB)
    machine.fail("cuMemsetD8_v2:1=719")
    with pytest.raises(CudaDeviceLost):
        p40.fill(address, 2 * MIB)
    machine.forget_calls()
    with pytest.raises(CudaDeviceLost, match="cuMemsetD8_v2"):
        p40.memory()
    assert machine.num_calls("cuMemGetInfo_v2") == 0
    assert "LAUNCH_FAILED" in str(p40.lost)


def test_a_card_that_falls_off_the_bus_leaves_the_other_one(machine: FakeMachine, driver: Driver, p40: Context):
    machine.lose_card(0, code=719)
    with pytest.raises(CudaDeviceLost):
        p40.memory()
    with driver.open(driver.devices[1]) as other:
        assert other.memory()[1] == 32 * MIB


def test_a_thread_without_a_context_works_and_is_left_as_it_was(machine: FakeMachine, p40: Context):
    raw = ctypes.CDLL(str(machine.library))
    seen: list[object] = []

    def use() -> None:
        nbytes, current = ctypes.c_uint64(), ctypes.c_void_p(1)
        seen.append(raw.cuMemAlloc_v2(ctypes.byref(nbytes), ctypes.c_size_t(1)))  # what bare calls get here
        seen.append(p40.memory()[1])
        raw.cuCtxGetCurrent(ctypes.byref(current))
        seen.append(current.value)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [201, 64 * MIB, None]


def test_another_cards_context_stays_current_for_its_thread(driver: Driver, p40: Context):
    with driver.open(driver.devices[1]) as other, other.active():
        assert p40.memory()[1] == 64 * MIB
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.library.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        assert total.value == 32 * MIB


def test_a_call_lets_other_threads_run(machine: FakeMachine, p40: Context):
    machine.fail("cuStreamSynchronize:*=~300")
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    p40.synchronize()
    ended = time.monotonic()
    stop.set()
    thread.join()
    assert ended - began >= 0.3
    assert any(began + 0.1 < one < began + 0.3 for one in ticks)


def test_a_forked_child_gets_a_typed_error_and_the_parent_goes_on(start: Start):
    process = start()
    assert process.use_in_a_fork() == CudaForked.__name__
    process.allocate(2 * MIB)


def test_use_after_close_is_refused(driver: Driver):
    context = driver.open(driver.devices[0])
    context.close()
    context.close()
    with pytest.raises(CudaMisuse, match="closed"):
        context.memory()


@pytest.mark.parametrize("offset", [-1, 2 * MIB - 4])
def test_copies_outside_an_allocation_are_refused(p40: Context, offset):
    address, data = p40.allocate(2 * MIB), bytearray(5)
    with pytest.raises(CudaMisuse, match="INVALID_VALUE"):
        p40.upload(address + offset, address_of(data), 5)
    with pytest.raises(CudaMisuse, match="INVALID_VALUE"):
        p40.download(address_of(data), address + offset, 5)


def test_what_is_called_is_what_the_signatures_list():
    text = "".join(path.read_text() for path in (ROOT / "kvd/cuda").glob("*.py"))
    for name in SIGNATURES:
        assert text.count(f'"{name}"') >= 2, f"{name} is listed and never called"
