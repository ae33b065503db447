"""Processes that share a segment: the same bytes, deaths on either side, and everything that must be refused."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kvd.errors import CudaImportRefused, CudaMisuse, StateError
from tests.cuda.conftest import Start
from tests.fakecuda.machine import MIB, P40, RTX_3050, FakeMachine
from tests.support.wait import eventually


def text(hexadecimal: str) -> str:
    return bytes.fromhex(hexadecimal).decode()


@pytest.mark.parametrize("visible", [("0", "0,1"), (P40.uuid, f"{RTX_3050.uuid},{P40.uuid}")])
def test_two_clients_that_count_cards_differently_map_the_same_memory(start: Start, visible):
    owner = start()
    export = owner.allocate(4 * MIB)
    owner.write(0, 3 * MIB, "shared")
    first, second = (start(CUDA_VISIBLE_DEVICES=one) for one in visible)
    for client in (first, second):
        client.grant(export)
        assert text(client.peek(0, 3 * MIB, 6)) == "shared"
    first.poke(0, 0, "from one client")
    assert text(second.peek(0, 0, 15)) == "from one client"
    assert text(owner.read(0, 0, 15)) == "from one client"


def test_bytes_that_were_not_waited_for_are_not_there(start: Start):
    owner, client = start(), start()
    client.grant(owner.allocate(2 * MIB))
    owner.write(0, 0, "old")
    owner.write_without_waiting(0, 0, "new")
    assert text(client.peek(0, 0, 3)) == "old"
    owner.wait_for_the_stream()
    assert text(client.peek(0, 0, 3)) == "new"


def test_kill_9_of_a_client_leaves_the_pool_intact(machine: FakeMachine, start: Start):
    owner, client, other = start(), start(), start()
    export = owner.allocate(4 * MIB)
    for one in (client, other):
        one.grant(export)
    client.poke(0, 0, "its last words")
    client.kill()
    assert text(owner.read(0, 0, 14)) == text(other.peek(0, 0, 14)) == "its last words"
    other.leave()
    owner.free(0)
    assert machine.held_nbytes() == 0


def test_kill_9_of_the_owner_leaves_mapped_clients_their_bytes_until_they_let_go(machine: FakeMachine, start: Start):
    owner, client = start(), start()
    export = owner.allocate(40 * MIB)
    owner.write(0, 0, "kept")
    client.grant(export)
    owner.kill()
    assert text(client.peek(0, 0, 4)) == "kept"
    assert machine.held_nbytes() == 40 * MIB
    # The next daemon lacks this memory exactly as long as the client holds on.
    restarted = start()
    with pytest.raises(MemoryError):
        restarted.allocate(40 * MIB)
    client.leave()
    assert machine.held_nbytes() == 0
    restarted.allocate(40 * MIB)


def test_a_handle_of_a_dead_owner_opens_nothing(start: Start):
    owner, client = start(), start()
    export = owner.allocate(2 * MIB)
    owner.kill()
    with pytest.raises(CudaImportRefused, match="does not open the daemon's memory"):
        client.grant(export)


def test_kill_9_of_everybody_leaves_nothing(machine: FakeMachine, start: Start):
    owner, client = start(), start()
    client.grant(owner.allocate(4 * MIB))
    for one in (owner, client):
        assert "/dev/shm/" not in Path(f"/proc/{one.pid}/maps").read_text()
    owner.kill()
    client.kill()
    eventually(lambda: machine.held_nbytes() == 0)
    start().allocate(64 * MIB)


def test_memory_that_is_freed_under_a_mapping_is_spoilt_which_is_why_pools_drain_first(start: Start):
    owner, client = start(), start()
    client.grant(owner.allocate(2 * MIB))
    owner.free(0)
    assert client.peek(0, 0, 4) == "dbdbdbdb"


def test_a_revoked_segment_is_closed_at_once_when_nothing_uses_it(machine: FakeMachine, start: Start):
    owner, client = start(), start()
    client.grant(owner.allocate(2 * MIB))
    assert client.revoke(0)
    assert client.revoke(0)  # a revoke of what it does not have is confirmed too
    owner.kill()
    eventually(lambda: machine.held_nbytes() == 0)


def test_the_owner_itself_is_refused_with_a_reason(start: Start):
    owner = start()
    with pytest.raises(CudaImportRefused, match="this very process"):
        owner.grant(owner.allocate(2 * MIB))


def test_a_process_in_another_pid_namespace_is_told_to_share_it(start: Start):
    owner = start()
    export = owner.allocate(2 * MIB)
    contained = start(prefix=["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"])
    assert contained.namespace() != owner.namespace()
    with pytest.raises(CudaImportRefused, match="--pid=host"):
        contained.grant(export)
    # What the driver itself would have said.
    with pytest.raises(CudaMisuse, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_CONTEXT"):
        contained.open_twice(export)


@pytest.mark.parametrize("visible", ["1", RTX_3050.uuid])
def test_a_process_that_does_not_see_the_card_is_told_its_uuid(start: Start, visible):
    owner = start()
    with pytest.raises(CudaImportRefused, match=f"does not see {P40.uuid}.*RTX 3050.*CUDA_VISIBLE_DEVICES"):
        start(CUDA_VISIBLE_DEVICES=visible).grant(owner.allocate(2 * MIB))


def test_a_uuid_that_no_card_has_is_refused(start: Start):
    export = start().allocate(2 * MIB) | {"device": "GPU-00000000-0000-0000-0000-000000000000"}
    with pytest.raises(CudaImportRefused, match="does not see GPU-00000000"):
        start().grant(export)


def test_a_process_without_a_driver_is_told_so(start: Start):
    export = start().allocate(2 * MIB)
    with pytest.raises(CudaImportRefused, match="has no GPU: no NVIDIA driver"):
        start(KVD_LIBCUDA="/nowhere/libcuda.so.1").grant(export)


def test_a_handle_of_one_card_is_not_opened_on_another_without_peer_access(start: Start):
    export = start().allocate(2 * MIB) | {"device": RTX_3050.uuid}
    with pytest.raises(CudaImportRefused, match="PEER_ACCESS_UNSUPPORTED"):
        start().grant(export)


@pytest.mark.parametrize("handle", [bytes(64), b"\xff" * 64, bytes(63), b""])
def test_garbage_is_refused(start: Start, handle):
    export = start().allocate(2 * MIB) | {"handle": base64.b64encode(handle).decode()}
    with pytest.raises(CudaImportRefused):
        start().grant(export)


def test_a_segment_of_another_epoch_is_refused(start: Start):
    export = start().allocate(2 * MIB) | {"epoch": 8}
    with pytest.raises(StateError, match="epoch 8 was granted in epoch 7"):
        start().grant(export)


def test_the_driver_counts_opens_of_one_handle(start: Start):
    owner, client = start(), start()
    export = owner.allocate(2 * MIB)
    assert client.open_twice(export)
    with pytest.raises(CudaMisuse, match="cuIpcCloseMemHandle"):
        client.close_twice(export)


def test_attaching_and_leaving_two_hundred_times_leaks_nothing(machine: FakeMachine, start: Start):  # case D6
    owner, client = start(), start()
    export = owner.allocate(2 * MIB)
    client.grant(export)
    client.leave()
    descriptors = len(list(Path(f"/proc/{client.pid}/fd").iterdir()))
    maps = Path(f"/proc/{client.pid}/maps").read_text().count("fakecuda")
    for _ in range(200):
        client.grant(export)
        client.leave()
    assert len(list(Path(f"/proc/{client.pid}/fd").iterdir())) == descriptors
    assert Path(f"/proc/{client.pid}/maps").read_text().count("fakecuda") == maps == 0
    assert machine.held_nbytes() == 2 * MIB
