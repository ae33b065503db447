"""torch absent, built for the CPU, built for CUDA: what a client can do with the memory."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_checks import actions
from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, Verdict, expect
from gpu_checks.torch_code import what_to_install
from kvd.cuda import DeviceExport
from kvd.errors import CudaImportRefused, EngineUnsupported

PATTERN = bytes(range(64))


def check(bench: Bench) -> Iterator[Row]:
    """Views in place, a kernel over them, and life without torch."""
    with bench.segment(4 * MIB) as (segment, export):
        segment.write(MIB, bytearray(PATTERN))
        bare = bench.peer()
        bare.call(actions.forget_torch)
        bare.call(actions.attach, [export])
        yield expect("torch", "absent: bytes are read", bare.call(actions.peek, export, MIB, 64) == PATTERN)
        try:
            bare.call(actions.tensor, export, MIB, 64)
            said = "a tensor without torch"
        except EngineUnsupported as error:
            said = str(error)
        yield expect("torch", "absent: tensors are refused", "need torch" in said, said)
        bare.call(actions.detach)
        bare.kill()
        yield from _with_torch(bench, export)


def _with_torch(bench: Bench, export: DeviceExport) -> Iterator[Row]:
    peer = bench.peer()
    facts = peer.call(actions.torch_facts)
    if facts is None:
        yield Row("torch", "installed", Verdict.TOLD, "no: the rows about tensors were not run")
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    archs = " ".join(facts["archs"]) or "no card"
    yield Row("torch", "installed", Verdict.TOLD, f"{facts['version']} ({build}), code for {archs}")
    peer.call(actions.attach, [export])
    try:
        found = peer.call(actions.tensor, export, MIB, 64)
    except (CudaImportRefused, EngineUnsupported) as error:
        yield expect("torch", "a build that cannot see the card is refused", not facts["sees"], str(error))
    else:
        yield expect("torch", "the view is the memory itself", found["in_place"], found["device"])
        yield expect("torch", "and has its bytes", found["data"] == PATTERN)
        # Views and copies need no kernel, so what is above holds for a torch without code for the card too.
        advice = what_to_install(facts["version"], facts["archs"], bench.device.compute_capability)
        if facts["sees"] and advice is not None:
            yield Row("torch", "code for the card", Verdict.WRONG, advice)
        else:
            computed = peer.call(actions.compute, export, MIB, 64)
            yield expect("torch", "a kernel over the view", computed == bytes(one + 1 for one in PATTERN))
    peer.call(actions.detach)
    peer.kill()
