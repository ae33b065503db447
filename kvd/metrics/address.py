"""Where metrics may be served: a loopback port or a unix socket, nowhere else."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import ConfigError

_EXAMPLES = "127.0.0.1:9464, [::1]:9464 or unix:///run/kvd/metrics.sock"
_MAX_PATH_NBYTES = 107


@dataclass(frozen=True, slots=True)
class Address:
    """Either `path`, of a unix socket, or `host` and `port`."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Raises `ConfigError` for what is no such address, and for one that other machines could reach."""
    if text.startswith("unix://"):
        path = Path(text.removeprefix("unix://"))
        if not path.is_absolute() or len(os.fsencode(path)) > _MAX_PATH_NBYTES:
            raise ConfigError(f"metrics.listen: {text!r} needs an absolute path of at most {_MAX_PATH_NBYTES} bytes")
        return Address(path=path)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        number, is_loopback = int(port), ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"metrics.listen must be like {_EXAMPLES}, not {text!r}") from error
    if not is_loopback:
        raise ConfigError(
            f"metrics.listen: {host} can be reached by other machines, and nothing there asks who they are; use "
            f"{_EXAMPLES}, with a proxy that does in front"
        )
    if not 0 <= number <= 65535:
        raise ConfigError(f"metrics.listen: {number} is no port")
    return Address(host=host, port=number)
