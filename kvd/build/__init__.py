"""Configuration -> objects. The only place that names concrete classes; whoever wants other parts builds them here."""

from kvd.build.assembly import Assembly, assemble
from kvd.build.pool_rules import pool_rules
from kvd.build.sizes import Sizes, decide_sizes, session_capacity
from kvd.build.tiers import check_tiers

__all__ = ["Assembly", "Sizes", "assemble", "check_tiers", "decide_sizes", "pool_rules", "session_capacity"]
