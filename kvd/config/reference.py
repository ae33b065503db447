"""CONFIG.md, made from the schema: `python -m kvd.config.reference > CONFIG.md`."""

from __future__ import annotations

import inspect
from operator import attrgetter

from kvd.config.keys import KEYS, POOL_KEYS, SECTIONS
from kvd.config.pool_rule import PoolRule
from kvd.config.schema import Config

_HEAD = """\
# Configuration

One TOML file < `KVD_*` environment < flags. The file is the one `--config` names, else `$KVD_CONFIG`, else
`~/.config/kvd/kvd.toml`, else `/etc/kvd/kvd.toml`; without one, the defaults hold. `kvd config show` prints every value
and where it came from, `kvd config check` only says whether it is right. Sizes are written `4GiB`, `512MiB`, `65536`
(KB, MB, GB count in 1000). A flag is followed by its value, except for the pair of flags of a truth value, which take
none. An unknown key is an error that names the nearest one; so is a variable that is nearly one of these.
"""

_POOLS = """
There may be any number of these tables; they are the file's alone, without variables and flags. SIGHUP reads them
again, together with `tiers.spill` and `tiers.after_promote`: pools follow the rule of their name, and a cache that is
open stays in the pool it has.

```toml
[[pools]]
name = "agents"
models = ["llama-3*", "qwen*"]
users = ["alice", 1001]
spill = "write_through"
```
"""


def markdown() -> str:
    """The page, ending in a newline."""
    parts = [_HEAD]
    for section in ("", *SECTIONS):
        if section:
            parts.append(f"\n## [{section}]\n{type(attrgetter(section)(Config())).__doc__}\n")
        parts.append("\n| key | environment | flag | value | default |\n|---|---|---|---|---|\n")
        keys = [key for key in KEYS.values() if key.section == section]
        for key in keys:
            default = f"`{key.format(key.default)}`" if key.default != "" else "-"
            flags = ", ".join(f"`{flag}`" for flag in key.flags)
            parts.append(f"| `{key.field}` | `{key.env}` | {flags} | {key.kind} | {default} |\n")
        parts.append("\n" + "".join(f"- `{key.field}`: {key.description}\n" for key in keys))
    return "".join(parts) + _pools()


def _pools() -> str:
    about = inspect.cleandoc(PoolRule.__doc__ or "")
    rows = "".join(f"| `{key.field}` | {key.kind} |\n" for key in POOL_KEYS.values())
    descriptions = "".join(f"- `{key.field}`: {key.description}\n" for key in POOL_KEYS.values())
    return f"\n## [[pools]]\n{about}\n{_POOLS}\n| key | value |\n|---|---|\n{rows}\n{descriptions}"


if __name__ == "__main__":
    print(markdown(), end="")
