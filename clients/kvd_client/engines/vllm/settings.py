"""What a user may say about the connector, in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any

import msgspec

from kvd.errors import ConfigError


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`; all of them may be left out."""

    runtime_dir: str | None = None
    """The daemon's runtime folder; without it the usual ones are looked at."""
    model: str | None = None
    """Names the weights in the place of their digest, for those that lie in no safetensors files. You vouch for it."""
    timeout_s: float = 2.0
    """How long a question of the scheduler may take. After one that took longer kvd is left alone for a while."""
    load_wait_s: float = 5.0
    """How long a load waits for blocks that come up from a tier below."""
    max_pending_saves: int = 256
    """Requests that may wait for being saved; what is more is dropped."""

    @classmethod
    def of(cls, extra_config: dict[str, Any]) -> Settings:
        """Raises `ConfigError`."""
        try:
            return msgspec.convert(extra_config, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config of KvdConnector: {error}") from error


def kvd_transfer_config(**settings: Any) -> Any:
    """The `KVTransferConfig` for `LLM(..., kv_transfer_config=...)`; `settings` are fields of `Settings`.

    Raises `ConfigError`.
    """
    from vllm.config import KVTransferConfig

    Settings.of(settings)
    return KVTransferConfig(
        kv_connector="KvdConnector",
        kv_connector_module_path="kvd_client.engines.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
