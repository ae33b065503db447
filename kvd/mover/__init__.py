"""Copies between the pools and the tiers below, off the loop: jobs, their queue, and the threads that carry them out.

The mover changes no block's state. It reads and writes the bytes that a job names, asks the tiers, and gives the job
back; what follows from that is the service's affair.

    mover = Mover(stack, on_ready=wake_the_loop); mover.start()
    mover.submit([Lookup(keys, on_done), Fill(ticket, key, place, into, on_done, wanted=True), …])
    for job in mover.take_done(): job.finish()                  on the loop, after each wake-up
    mover.close()                                               then the stack may be closed
"""

from kvd.mover.jobs import Audit, Carry, Drop, Fill, Flush, Job, Learn, ListNames, Lookup, Measure, Rank, Spill
from kvd.mover.mover import Mover

__all__ = [
    "Audit",
    "Carry",
    "Drop",
    "Fill",
    "Flush",
    "Job",
    "Learn",
    "ListNames",
    "Lookup",
    "Measure",
    "Mover",
    "Rank",
    "Spill",
]
