"""Text that may hold a password, as it may be shown."""

from __future__ import annotations

import re

# Up to the last @: whoever forgot to encode an @ or a / in a password must not see the rest of it printed.
_LOGIN = re.compile(r"://([^:@/?#]*):.*@", re.DOTALL)
_OPTION = re.compile(r"([?&](?:pass|passwd|password|pwd|auth|token|secret)=)[^&#]*", re.IGNORECASE)


def redacted(url: str) -> str:
    """The URL with stars in the place of its password."""
    return _OPTION.sub(r"\1***", _LOGIN.sub(r"://\1:***@", url))
