"""Where blocks live that fell out of the pool: host RAM and Redis, behind one contract.

`base` is the contract. `host` keeps blocks in memory files; `redis_tier` in any Redis or Valkey, `embedded` being the
one kvd runs itself. A tier is synchronous: mover threads call it, never the ROUTER loop, and the large calls (socket
and file transfers, hashing, compression) let the interpreter lock go.
"""
