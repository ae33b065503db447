"""Configuration -> objects. The only place that names concrete classes; whoever wants other parts builds them here."""

from kvd.build.assembly import Assembly, assemble
from kvd.build.sizes import Sizes, decide_sizes, session_capacity

__all__ = ["Assembly", "Sizes", "assemble", "decide_sizes", "session_capacity"]
