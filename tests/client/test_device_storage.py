"""How a sequence lies on a card: which blocks make one part, what is copied, and what is let go of when."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from kvd.block import BlockId
from kvd.cuda import DeviceExport
from kvd.errors import EngineUnsupported, OutOfMemory
from kvd.layout import KVLayout
from kvd_client.memory import device_imports, device_pieces, device_storage
from kvd_client.memory.attendant import attendant
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.device_segments import DevicePoolMemory, DeviceSegmentTable
from kvd_client.memory.device_storage import DeviceStorage
from tests.cuda.conftest import Start
from tests.cuda.process import CudaProcess
from tests.cuda.worker import EPOCH
from tests.fakecuda.machine import MIB, P40, FakeMachine

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=4)
BLOCK = LAYOUT.block_nbytes
PER_SEGMENT = 8
TOKENS = LAYOUT.block_tokens


@pytest.fixture
def owner(start: Start) -> CudaProcess:
    return start()


@pytest.fixture
def memory(owner: CudaProcess) -> Iterator[DevicePoolMemory]:
    """Four segments of eight blocks; block b holds b in every number."""
    table = DeviceSegmentTable(EPOCH)

    def acquire(pool: int, segment: int) -> ImportedSegment:
        found = table.acquire(pool, segment)
        assert found is not None
        return found

    memory = DevicePoolMemory(P40.uuid, 0, BLOCK, PER_SEGMENT, acquire)
    for segment in range(4):
        table.granted(0, segment, msgspec.convert(owner.allocate(2 * MIB), DeviceExport))
    for block in range(4 * PER_SEGMENT):
        shared(memory, block).fill_(block)
    yield memory
    table.close()
    gc.collect()
    assert attendant().settle(10)
    assert device_imports.num_open() == 0


@pytest.fixture(autouse=True)
def attending(memory: DevicePoolMemory) -> None:
    """As a session does that opens a cache on a card."""
    with attendant()._starting:
        attendant()._start()


Make = Callable[..., DeviceStorage]


@pytest.fixture
def make(memory: DevicePoolMemory) -> Iterator[Make]:
    """`make(sealed blocks, reserved blocks)`."""
    made: list[DeviceStorage] = []

    def make(sealed: list[int], reserved: list[int], *, max_blocks: int = 24, packed: bool = False) -> DeviceStorage:
        made.append(DeviceStorage(LAYOUT, max_blocks, memory, packed=packed))
        made[-1].fill(ids([*sealed, *reserved]), len(sealed), populate=True)
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def ids(blocks: list[int]) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def shared(memory: DevicePoolMemory, block: int) -> torch.Tensor:
    """The block itself, as numbers."""
    (run,) = memory.runs(ids([block]))
    address = run.segment.address + run.offset
    device_imports.release(run.segment)
    raw = (ctypes.c_ubyte * BLOCK).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float16)


def shown(storage: DeviceStorage, num_blocks: int) -> list[list[int]]:
    """Per part, the block whose content stands at each place; every layer must say the same."""
    said = []
    for layer in range(LAYOUT.num_layers):
        parts = []
        for keys, values in storage.parts(layer, num_blocks * TOKENS):
            assert torch.equal(keys, values)
            by_token = keys[0, :, 0].tolist()
            assert bool((keys == keys[:1, :, :1]).all())
            parts.append([int(value) for value in by_token[::TOKENS]])
            assert by_token == [value for value in by_token[::TOKENS] for _ in range(TOKENS)]
        said.append(parts)
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize(
    ("sealed", "reserved", "parts", "num_copied"),
    [
        ([], [3, 4, 5], [[3, 4, 5]], 0),
        ([2, 3], [4, 5], [[2, 3, 4, 5]], 0),  # the room lies right behind the prefix
        ([2, 3], [10, 11], [[2, 3], [10, 11]], 0),
        ([6, 7], [8, 9], [[6, 7], [8, 9]], 0),  # neighbours by number, but in two segments
        ([2, 9], [10, 11], [[2], [9, 10, 11]], 0),  # two runs, wherever the border
        ([2, 9], [20, 21], [[2, 9], [20, 21]], 2),  # a scattered prefix is gathered
        ([5, 4, 3], [20], [[5, 4, 3], [20]], 3),
        ([2, 3], [10, 12], [[2, 3], ["-", "-"]], 0),  # scattered room is private, and nothing is in it
        ([2, 9], [20, 22], [[2, 9, "-", "-"]], 2),
        ([2, 9, 4], [], [[2, 9, 4]], 3),
        ([], [1, 3, 5], [["-", "-", "-"]], 0),
    ],
    ids=str,
)
def test_a_sequence_is_two_parts_at_most_and_copies_only_what_is_scattered(
    make: Make, sealed: list[int], reserved: list[int], parts: list[list[object]], num_copied: int
) -> None:
    storage = make(sealed, reserved)
    found = [
        [place if word != "-" else "-" for place, word in zip(part, wanted, strict=True)]
        for part, wanted in zip(
            [keys[0, ::TOKENS, 0].int().tolist() for keys, _ in storage.parts(1, len(sealed + reserved) * TOKENS)],
            parts,
            strict=True,
        )
    ]
    assert found == parts
    assert storage.num_copied_bytes == num_copied * BLOCK


def test_a_part_is_the_shared_memory_itself(make: Make, memory: DevicePoolMemory) -> None:
    storage = make([2, 3], [10, 11])
    (keys, _), (tail, _) = storage.parts(0, 4 * TOKENS)
    assert keys.data_ptr() == shared(memory, 2).data_ptr()
    assert tail.data_ptr() == shared(memory, 10).data_ptr()
    assert not storage.is_private


def numbered(start: int, stop: int) -> torch.Tensor:
    """Keys whose every number is its token."""
    tokens = torch.arange(start, stop, dtype=torch.float16)
    return tokens[None, :, None].expand(LAYOUT.num_kv_heads, stop - start, LAYOUT.head_dim)


def write(storage: DeviceStorage, start: int, stop: int) -> None:
    for layer in range(LAYOUT.num_layers):
        storage.write(layer, start, numbered(start, stop), numbered(start, stop))


def holds(storage: DeviceStorage, start: int, stop: int) -> bool:
    for layer in range(LAYOUT.num_layers):
        for which in range(2):
            whole = torch.cat([part[which] for part in storage.parts(layer, stop)], dim=1)
            if not torch.equal(whole[:, start:], numbered(start, stop)):
                return False
    return True


def test_what_is_written_over_the_border_of_two_parts_is_in_both(make: Make, memory: DevicePoolMemory) -> None:
    storage = make([], [6, 7, 8, 9])
    write(storage, 0, 13)
    assert holds(storage, 0, 13)
    assert storage.num_parts(0, 8) == 1
    assert storage.num_parts(0, 9) == storage.num_parts(7, 9) == 2
    assert shared(memory, 7).view(TOKENS, -1)[:, 0].tolist() == [4, 5, 6, 7]
    assert shared(memory, 9).view(TOKENS, -1)[0, 0] == 12


@pytest.mark.parametrize(
    ("reserved", "more", "num_parts", "num_copied"),
    [
        ([2, 3], [4, 5], 1, 0),  # neighbours: the part grows
        ([2, 3], [6, 7], 2, 0),
        ([2, 3], [6, 9], 2, 0),  # scattered room becomes a private part
        ([2, 3, 10], [11, 12], 2, 0),
        ([2, 3, 10], [20], 2, 1),  # a third part: the second moves to private memory with it
        ([2, 4, 6], [7], 1, 0),  # private already, with room left
        ([2, 4, 6], [7, 8, 9, 10], 1, 3),  # private already, and too small
    ],
    ids=str,
)
def test_growing_keeps_every_token_and_moves_only_the_last_part(
    make: Make, reserved: list[int], more: list[int], num_parts: int, num_copied: int
) -> None:
    storage = make([], reserved)
    held = len(reserved) * TOKENS
    write(storage, 0, held)
    before = storage.parts(1, held)
    storage.attach(len(reserved), ids(more), sealed=False, populate=True)
    write(storage, held, held + len(more) * TOKENS)
    assert holds(storage, 0, held + len(more) * TOKENS)
    assert storage.num_parts(0, held + len(more) * TOKENS) == num_parts
    assert storage.num_copied_bytes == num_copied * BLOCK
    if len(before) == 2 or not storage.is_private:
        assert storage.parts(1, held)[0][0].data_ptr() == before[0][0].data_ptr()
    # What was shown before shows the same.
    assert torch.equal(torch.cat([keys for keys, _ in before], dim=1), numbered(0, held))


def test_growing_step_by_step_in_private_memory_copies_a_bounded_number_of_times(make: Make) -> None:
    storage = make([], [0, 2, 4], max_blocks=32)
    for place in range(3, 24):
        storage.attach(place, ids([place + 4]), sealed=False, populate=True)
        write(storage, 0, (place + 1) * TOKENS)
    assert holds(storage, 0, 24 * TOKENS)
    assert storage.num_copied_bytes < 3 * 24 * BLOCK


@pytest.mark.parametrize("packed", [True, False])
def test_private_memory_goes_to_the_shared_blocks_when_it_is_published(
    make: Make, memory: DevicePoolMemory, packed: bool
) -> None:
    storage = make([], [20, 9, 11, 3], packed=packed)
    write(storage, 0, 14)
    assert shared(memory, 9)[0] == 9
    storage.publish(1, ids([9, 11]))
    assert shared(memory, 20)[0] == 20
    assert shared(memory, 3)[0] == 3
    for place, block in ((1, 9), (2, 11)):
        right = torch.arange(place * TOKENS, (place + 1) * TOKENS, dtype=torch.float16)
        assert torch.equal(shared(memory, block).view(TOKENS, -1), right[:, None].expand(TOKENS, BLOCK // 2 // TOKENS))


def test_blocks_in_place_are_published_by_nothing(make: Make, memory: DevicePoolMemory) -> None:
    storage = make([], [20, 21])
    write(storage, 0, 8)
    before = storage.num_copied_bytes
    storage.publish(0, ids([20, 21]))
    assert storage.num_copied_bytes == before
    assert shared(memory, 21).view(TOKENS, -1)[:, 0].tolist() == [4, 5, 6, 7]


def test_packed_memory_has_a_layers_tokens_side_by_side(make: Make) -> None:
    storage = make([2, 3], [4, 5], packed=True)
    ((keys, values),) = storage.parts(1, 2 * TOKENS)
    assert keys.stride() == (keys.stride(0), LAYOUT.head_dim, 1)
    assert shown(storage, 2) == [[2, 3]]
    assert storage.is_private
    assert storage.num_copied_bytes == 2 * BLOCK
    write(storage, 8, 16)
    assert holds(storage, 8, 16)
    assert bool((values[:, :TOKENS] == 2).all())
    storage.attach(4, ids([20, 22, 24]), sealed=False, populate=True)
    write(storage, 16, 28)
    assert holds(storage, 8, 28)


def test_gathering_makes_one_part_once_and_leaves_earlier_views_right(make: Make) -> None:
    storage = make([2, 3], [10, 11])
    write(storage, 8, 12)
    before = storage.parts(0, 12)
    storage.gather()
    assert storage.num_parts(0, 16) == 1
    assert storage.num_copied_bytes == 4 * BLOCK
    assert holds(storage, 8, 12)
    storage.gather()
    assert storage.num_copied_bytes == 4 * BLOCK
    write(storage, 12, 16)
    assert holds(storage, 8, 16)
    assert [keys.shape[1] for keys, _ in before] == [8, 4]
    assert torch.equal(before[1][0], numbered(8, 12))
    # Growing goes on in the same part.
    storage.attach(4, ids([12]), sealed=False, populate=True)
    assert storage.num_parts(0, 20) == 1


def test_spans_and_contents_are_the_bytes_in_their_order(make: Make) -> None:
    for storage in (make([2, 3], [10, 11]), make([2, 9], [20, 22]), make([2, 9], [20], packed=True)):
        write(storage, 8, 12)
        for start, stop in ((0, 12), (3, 11), (5, 5), (9, 12)):
            spans = torch.cat(storage.spans(start, stop)).contiguous()
            assert spans.shape == (stop - start, LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim)
            assert bytes(storage.contents(start, stop)) == spans.view(torch.uint8).numpy().tobytes()
        with pytest.raises(EngineUnsupported, match=r"on a GPU.*\.cpu\(\)"):
            storage.bytes(0, 4)


@pytest.mark.parametrize("target", [[20, 21, 22, 23], [20, 22, 24, 26], [6, 7, 8, 9]], ids=str)
@pytest.mark.parametrize("source", [[0, 1, 2, 3], [0, 2, 14, 15], [6, 7, 14, 15]], ids=str)
def test_tokens_are_copied_between_any_two_arrangements(make: Make, source: list[int], target: list[int]) -> None:
    one, other = make([], source), make([], target)
    write(one, 0, 16)
    write(other, 0, 3)
    assert other.copy_tokens(one, 3, 15) == 12 * LAYOUT.token_nbytes
    assert holds(other, 0, 15)
    assert other.copy_tokens(one, 5, 5) == 0


def test_blocks_that_stand_elsewhere_take_the_place_of_ours_where_two_parts_do(make: Make) -> None:
    storage = make([], [10, 11, 12, 13])
    assert storage.replace({0: BlockId(2), 1: BlockId(3)})
    assert shown(storage, 4) == [[2, 3], [12, 13]]
    # A third part would come of these.
    assert not storage.replace({3: BlockId(20)})
    assert shown(storage, 4) == [[2, 3], [12, 13]]
    assert storage.num_copied_bytes == 0


def test_a_private_copy_needs_no_other_block(make: Make) -> None:
    storage = make([], [10, 12, 14])
    write(storage, 0, 12)
    assert storage.replace({0: BlockId(2), 2: BlockId(7)})
    assert holds(storage, 0, 12)
    mixed = make([2, 3], [10, 12])
    assert not mixed.replace({0: BlockId(6)})


def test_memory_that_is_not_to_be_had_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = make([2, 3], [10, 11])
    write(storage, 8, 16)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OutOfMemory("no more")

    with monkeypatch.context() as patch:
        patch.setattr(device_pieces, "private_views", refuse)
        with pytest.raises(OutOfMemory):
            storage.attach(4, ids([20]), sealed=False, populate=True)
        storage.detach(4)
        with pytest.raises(OutOfMemory):
            storage.gather()
    assert storage.num_parts(0, 16) == 2
    assert holds(storage, 8, 16)
    storage.attach(4, ids([20]), sealed=False, populate=True)
    write(storage, 16, 20)
    assert holds(storage, 8, 20)


def test_an_attach_that_came_to_nothing_is_taken_back(make: Make) -> None:
    storage = make([2, 3], [4, 5])
    storage.attach(4, ids([6, 7]), sealed=False, populate=True)
    storage.attach(6, ids([20]), sealed=False, populate=True)
    storage.detach(5)
    assert shown(storage, 5) == [[2, 3, 4, 5, 6]]
    storage.attach(5, ids([7]), sealed=False, populate=True)
    assert shown(storage, 6) == [[2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_done_in_whatever_order_every_token_is_where_it_was_written(
    make: Make, memory: DevicePoolMemory, seed: int
) -> None:
    """Against a plain list of what each token holds: growing, writing, publishing, cutting, gathering, replacing."""
    chance = random.Random(seed)
    free = list(range(4 * PER_SEGMENT))

    def take(count: int) -> list[int]:
        """Neighbours, or whatever there is."""
        start = chance.randrange(len(free))
        found = free[start : start + count] if chance.random() < 0.6 else chance.sample(free, min(count, len(free)))
        for block in found:
            free.remove(block)
        return found

    sealed, reserved = take(chance.randrange(4)), take(chance.randrange(1, 4))
    storage = make(sealed, reserved, max_blocks=24, packed=chance.random() < 0.2)
    blocks, num_fixed = [*sealed, *reserved], len(sealed)
    held: list[float] = [float(block) for block in sealed for _ in range(TOKENS)]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _step in range(25):
        todo = chance.choice(["write", "write", "extend", "publish", "gather", "keep", "copy", "detach"])
        room = len(blocks) * TOKENS - len(held)
        if todo == "write" and room:
            count, value = chance.randrange(1, room + 1), float(chance.randrange(1000, 2000))
            new = torch.full((LAYOUT.num_kv_heads, count, LAYOUT.head_dim), value, dtype=torch.float16)
            for layer in range(LAYOUT.num_layers):
                storage.write(layer, len(held), new, new)
            held += [value] * count
        elif todo == "extend" and free and len(blocks) < 20:
            more = [blocks[-1] + 1] if chance.random() < 0.5 else []
            if more and more[0] in free and more[0] % PER_SEGMENT:
                free.remove(more[0])
            else:
                more = take(chance.randrange(1, 4))
            storage.attach(len(blocks), ids(more), sealed=False, populate=True)
            blocks += more
        elif todo == "publish" and len(held) // TOKENS > num_fixed:
            full = len(held) // TOKENS
            storage.publish(num_fixed, ids(blocks[num_fixed:full]))
            for place in range(num_fixed, full):
                right = torch.tensor(held[place * TOKENS : (place + 1) * TOKENS], dtype=torch.float16)
                found = shared(memory, blocks[place]).view(TOKENS, -1)
                assert torch.equal(found, right[:, None].expand_as(found))
            num_fixed = full
        elif todo == "gather":
            storage.gather()
        elif todo == "keep":
            for keys, _values in storage.parts(0, len(held)):
                kept.append((keys, keys.clone()))
        elif todo == "copy" and held and len(free) >= len(blocks):
            other = make([], take(len(blocks)))
            if len(other._blocks) >= len(held) // TOKENS + 1:
                other.copy_tokens(storage, 0, len(held))
                assert shown_tokens(other, len(held)) == held
            free += other._blocks
        elif todo == "detach" and len(blocks) * TOKENS - len(held) >= 2 * TOKENS and not kept:
            storage.detach(len(blocks) - 1)
            free.append(blocks.pop())
        assert 1 <= storage.num_parts(0, len(blocks) * TOKENS) <= 2
        assert shown_tokens(storage, len(held)) == held
    for tensor, right in kept:
        assert torch.equal(tensor, right)


def shown_tokens(storage: DeviceStorage, num_tokens: int) -> list[float]:
    """The one number that each token holds, the same in every layer, head and dimension."""
    found: list[list[float]] = []
    for layer in range(LAYOUT.num_layers):
        for which in range(2):
            whole = torch.cat([part[which] for part in storage.parts(layer, num_tokens)], dim=1)
            assert bool((whole == whole[:1, :, :1]).all())
            found.append(whole[0, :, 0].tolist())
    assert all(each == found[0] for each in found)
    return found[0]


# case B14
@pytest.mark.parametrize("which", [0, 1, "left"])
def test_the_end_waits_for_the_last_view_and_then_for_the_card(
    make: Make, monkeypatch: pytest.MonkeyPatch, which: object
) -> None:
    order: list[str] = []
    monkeypatch.setattr(device_storage, "wait_for_device", lambda _segment: order.append("waited"))
    storage = make([2, 3], [10, 11])
    if which == "left":
        view = storage.parts(0, 16)[1][0]
        storage.gather()
    else:
        view = storage.parts(0, 16)[int(str(which))][0]
    assert storage.has_live_views()
    storage.when_unused(lambda: order.append("unused"))
    part = view[:, 1:3]
    del view
    gc.collect()
    assert order == []
    del part
    gc.collect()
    assert attendant().settle(10)
    assert order == ["waited", "unused"]
    assert not storage.has_live_views()


def test_private_memory_lives_as_long_as_a_tensor_over_it(make: Make) -> None:
    storage = make([2, 9], [20])
    keys, _ = storage.parts(0, 8)[0]
    right = keys.clone()
    storage.close()
    del storage
    gc.collect()
    torch.full((BLOCK,), 77, dtype=torch.uint8)
    assert torch.equal(keys, right)


# case D6
def test_what_a_storage_opened_is_closed_with_it(make: Make, memory: DevicePoolMemory, machine: FakeMachine) -> None:
    for sealed, reserved in (([2, 3], [10, 11]), ([2, 9], [20, 22]), ([5, 4, 3], [30])):
        storage = make(sealed, reserved)
        storage.publish(len(sealed), ids(reserved[:1]))
        storage.gather()
        storage.close()
        storage.close()
