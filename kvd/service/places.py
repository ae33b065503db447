"""Which pool a cache or a pin is in: by what was asked for, by the rules about pools, by what the daemon has."""

from __future__ import annotations

from collections.abc import Callable

from kvd.blobs import is_blob_engine
from kvd.block import HOST
from kvd.layout import KVLayout
from kvd.pool import Pool, Pools
from kvd.protocol.requests import OpenCache
from kvd.service.homes import Homes
from kvd.service.pin_files import PinRecord
from kvd.service.pool_rules import PoolRules
from kvd.service.sessions import Session


class Places:
    """Makes pools on demand. Loop thread only."""

    def __init__(self, pools: Pools, homes: Homes, rules: Callable[[], PoolRules]) -> None:
        self._pools = pools
        self._homes = homes
        self._rules = rules

    def of_cache(self, session: Session, request: OpenCache, block_nbytes: int) -> Pool:
        """Raises what says that it cannot be where it is to be."""
        rules = self._rules()
        name = rules.name_for(model=request.model, engine=request.engine, uid=session.identity.uid)
        by_rule = rules.device(name)
        if is_blob_engine(request.engine) and self._homes.has_host:
            by_rule = HOST  # bytes, which no card computes with
        chosen = self._homes.choose(request.device, staged=request.staged, by_rule=by_rule)
        source = None
        if chosen.source is not None:
            source = self._pools.pool(session.tenant, block_nbytes, name, device=chosen.source.device)
        return self._pools.pool(session.tenant, block_nbytes, name, device=chosen.home.device, source=source)

    def of_pin(self, record: PinRecord, layout: KVLayout) -> Pool:
        """Where who asks for that prompt and names no device would look for it."""
        rules = self._rules()
        name = rules.name_for(model=record.model, engine=record.engine, uid=record.uid)
        home = self._homes.choose("", staged=False, by_rule=rules.device(name)).home
        return self._pools.pool(record.tenant, layout.block_nbytes, name, device=home.device)
