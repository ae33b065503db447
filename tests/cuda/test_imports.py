"""The client's side in this process: one open for all, views that keep it open, revokes that wait for them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from kvd.cuda import DeviceExport
from kvd.errors import CudaError, CudaImportRefused, EngineUnsupported
from kvd_client.memory import device_imports
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.device_segments import DeviceSegmentTable
from kvd_client.memory.device_views import DeviceArray, DeviceViews, device_views
from kvd_client.memory.tensors import Views
from tests.cuda.conftest import Start
from tests.cuda.process import CudaProcess
from tests.cuda.worker import EPOCH
from tests.fakecuda.machine import MIB, FakeMachine


@pytest.fixture
def owner(start: Start) -> CudaProcess:
    return start()


@pytest.fixture
def export(owner: CudaProcess) -> Iterator[DeviceExport]:
    yield msgspec.convert(owner.allocate(2 * MIB), DeviceExport)
    assert device_imports.num_open() == 0


def opened(table: DeviceSegmentTable, pool: int, segment: int, export: DeviceExport) -> ImportedSegment:
    """Granted and opened, with no user but the table."""
    table.granted(pool, segment, export)
    found = table.acquire(pool, segment)
    assert found is not None
    device_imports.release(found)
    return found


@pytest.fixture
def table() -> Iterator[DeviceSegmentTable]:
    table = DeviceSegmentTable(EPOCH)
    yield table
    table.close()


def test_two_sessions_of_one_process_open_a_segment_once(export, table, machine: FakeMachine):
    other = DeviceSegmentTable(EPOCH)
    first, second = opened(table, 0, 3, export), opened(other, 5, 3, export)
    assert first.is_of(second)
    assert machine.num_calls("cuIpcOpenMemHandle_v2") == 1
    table.close()
    assert len(other) == 1
    assert device_imports.num_open() == 1
    other.close()
    other.close()
    assert machine.num_calls("cuIpcCloseMemHandle") == 1


def test_a_segment_is_opened_at_its_first_use_and_not_again(export, table, machine: FakeMachine):
    table.granted(0, 0, export)
    assert machine.num_calls("cuIpcOpenMemHandle_v2") == len(table) == 0
    assert (0, 0) in table
    assert opened(table, 0, 0, export).is_of(opened(table, 0, 0, export))
    assert machine.num_calls("cuIpcOpenMemHandle_v2") == len(table) == 1
    table.close()
    assert device_imports.num_open() == 0


def test_what_is_not_granted_is_not_found(export, table):
    assert table.acquire(0, 0) is None
    table.granted(0, 0, export)
    assert table.acquire(0, 1) is None


def test_a_segment_that_was_never_opened_is_confirmed_at_once(export, table, machine: FakeMachine):
    closed: list[str] = []
    table.granted(0, 0, export)
    table.revoked(0, 0, lambda: closed.append("closed"))
    assert closed == ["closed"]
    assert table.acquire(0, 0) is None
    assert machine.num_calls("cuIpcOpenMemHandle_v2") == 0


def test_a_session_that_ends_while_the_driver_opens_keeps_nothing(export, table, monkeypatch: pytest.MonkeyPatch):
    table.granted(0, 0, export)
    acquire = device_imports.acquire

    def acquire_and_end(*arguments: Any) -> ImportedSegment:
        found = acquire(*arguments)
        table.close()
        return found

    monkeypatch.setattr(device_imports, "acquire", acquire_and_end)
    assert table.acquire(0, 0) is None
    assert device_imports.num_open() == len(table) == 0


def test_two_threads_that_want_a_segment_open_it_once(export, table, machine: FakeMachine):
    table.granted(0, 0, export)
    start, found = threading.Barrier(4), []

    def want() -> None:
        start.wait()
        found.append(table.acquire(0, 0))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.is_of(found[0]) for one in found)
    assert machine.num_calls("cuIpcOpenMemHandle_v2") == 1
    for each in found:
        device_imports.release(each)
    table.close()
    assert device_imports.num_open() == 0


def test_the_tensor_is_the_memory_itself(owner, export, table):
    segment = opened(table, 0, 0, export)
    views = device_views(segment, MIB, MIB)
    tensor = views.tensor("float16")
    assert tensor.data_ptr() == segment.address + MIB
    assert tensor.shape == (MIB // 2,)
    tensor[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16)
    assert bytes.fromhex(owner.read(0, MIB, 8)) == torch.tensor([1, 2, 3, 4], dtype=torch.float16).numpy().tobytes()
    del tensor
    table.close()


def test_memory_that_the_cpu_can_touch_is_a_cpu_tensor_where_torch_has_no_cuda(export, table):
    segment = opened(table, 0, 0, export)
    assert segment.host_address == segment.address
    assert isinstance(device_views(segment, 0, MIB), Views)
    segment.opened.host_address = None
    with pytest.raises(CudaImportRefused, match="does not see the card GPU-a0b1c2d3"):
        device_views(segment, 0, MIB)


def test_a_revoked_segment_is_confirmed_when_its_last_user_lets_go(export, table):
    closed: list[str] = []
    user = device_imports.share(opened(table, 0, 0, export))
    table.revoked(0, 0, lambda: closed.append("closed"))
    assert (0, 0) not in table
    assert not closed
    views = device_views(user, 0, MIB)
    tensor = views.tensor("uint8")
    views.when_dead(lambda: device_imports.release(user))
    part = tensor[10:20]
    del tensor
    gc.collect()
    assert not closed
    del part
    gc.collect()
    assert closed == ["closed"]


def test_the_end_of_an_epoch_closes_what_nobody_views(owner, export, table, machine: FakeMachine):
    opened(table, 0, 0, export)
    owner.kill()
    assert machine.held_nbytes() == 2 * MIB
    table.close()
    assert machine.held_nbytes() == 0


def test_an_open_that_fails_leaves_nothing(export, table, machine: FakeMachine):
    for call in ("cuIpcOpenMemHandle_v2", "cuPointerGetAttribute", "cuDevicePrimaryCtxRetain"):
        machine.fail(f"{call}:1=999")
        with pytest.raises(CudaError, match=call):
            opened(table, 0, 0, export)
        assert device_imports.num_open() == len(table) == 0
    machine.fail("")
    assert machine.num_calls("cuIpcCloseMemHandle") == machine.num_calls("cuIpcOpenMemHandle_v2") - 1
    opened(table, 0, 0, export)


def test_a_driver_that_refuses_says_why_in_its_own_words(export, table, machine: FakeMachine):
    machine.fail("cuIpcOpenMemHandle_v2:1=201")
    with pytest.raises(CudaImportRefused, match="CUDA_ERROR_INVALID_CONTEXT") as caught:
        opened(table, 0, 0, export)
    assert caught.value.result == 201


def test_a_close_that_fails_is_told_and_raises_nothing(export, table, machine: FakeMachine, caplog):
    opened(table, 0, 0, export)
    machine.fail("cuIpcCloseMemHandle:1=999")
    table.close()
    assert "stays mapped: cuIpcCloseMemHandle" in caplog.text


def test_a_lost_card_closes_quietly(export, table, machine: FakeMachine, caplog):
    opened(table, 0, 0, export)
    machine.lose_card(0)
    table.close()
    assert not caplog.records


def test_a_forked_child_has_nothing_open_and_closes_nothing(owner, export, start: Start):  # case B9
    client = start()
    client.grant(msgspec.to_builtins(export))
    owner.write(0, 0, "kept")
    said = client.leave_in_a_fork()
    assert said == "had 1 open, the child 0 and then 0; a driver there: CudaUnavailable"
    assert bytes.fromhex(client.peek(0, 0, 4)) == b"kept"


def test_a_device_tensor_names_the_address_and_lives_as_long_as_a_view(monkeypatch: pytest.MonkeyPatch):
    """Without a card torch cannot make one; what it is given, and what it must keep, is seen all the same."""
    given: list[tuple[dict[str, object], str]] = []
    backing = bytearray(64)

    def as_tensor(array: DeviceArray, device: str) -> torch.Tensor:
        given.append((array.__cuda_array_interface__, device))
        tensor = torch.frombuffer(backing, dtype=torch.uint8)
        weakref.finalize(tensor, lambda kept: None, array)  # as torch's deleter holds the object
        return tensor

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    views, dead = DeviceViews(0x7F00_0000_0000, 64, "cuda:1"), []
    tensor = views.tensor("float32")
    assert tensor.shape == (16,)
    assert given == [
        ({"shape": (64,), "typestr": "|u1", "data": (0x7F00_0000_0000, False), "strides": None, "version": 3}, "cuda:1")
    ]
    with pytest.raises(EngineUnsupported, match="on a GPU"):
        views.bytes()
    del tensor
    gc.collect()
    views.when_dead(lambda: dead.append(True))
    assert dead
    assert not views.any_alive()
