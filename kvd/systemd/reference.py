"""The folder systemd/ of the source: what `kvd install` writes for a kvd in /usr/bin, for those who make packages.

Made with: python -m kvd.systemd.reference systemd
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvd.systemd.units import SYSTEM_UNIT, Program, system_files, user_files, user_unit

_PROGRAM = Program(argv=("/usr/bin/kvd",), folders=())
_HOME = Path("/home/user/.config")


def reference_files() -> dict[str, str]:
    """Path within the folder -> text."""
    files = {
        path.name if path.parent == SYSTEM_UNIT.parent else f"{path.parent.name}/{path.name}": text
        for path, text in system_files(_PROGRAM).items()
    }
    return files | {"user/kvd.service": user_files(_PROGRAM, _HOME)[user_unit(_HOME)]}


if __name__ == "__main__":
    for name, text in reference_files().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
