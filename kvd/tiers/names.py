"""What a namespace is called, kept beside its blocks: so that a flush finds it by model when nobody here opened it.

Written as JSON, since people look into a Redis too: {"digest": 64 hex, "tenant": …, "model": …, "engine": …,
"adapter": …}. A long text is stored as `sha256:` and the digest of it, which is enough to be found by. The salt, which
may be a secret, is only in the digest.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvd.block import HASH_NBYTES, NamespaceDigest

MAX_TEXT_NBYTES = 512
"""Of a model's, engine's or adapter's name; every question about a namespace brings them along."""

_Hex = Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{2 * HASH_NBYTES}}}\Z")]


class NamespaceName(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace in words; all of them but the salt, the layout and the positional configuration."""

    digest: _Hex
    tenant: str
    model: str
    engine: str
    adapter: str

    @property
    def namespace(self) -> NamespaceDigest:
        """The namespace's digest."""
        return NamespaceDigest(bytes.fromhex(self.digest))

    def is_of_model(self, model: str) -> bool:
        """Whether it was made for that model."""
        return self.model == _short(model)


def name_of(
    namespace: NamespaceDigest, *, tenant: str, model: str, engine: str = "", adapter: str = ""
) -> NamespaceName:
    """Long texts become their digest."""
    return NamespaceName(
        digest=namespace.hex(), tenant=tenant, model=_short(model), engine=_short(engine), adapter=_short(adapter)
    )


def encode_name(name: NamespaceName) -> bytes:
    """As it is stored."""
    return msgspec.json.encode(name)


def decode_name(text: bytes) -> NamespaceName | None:
    """None for what is no name."""
    try:
        return msgspec.json.decode(text, type=NamespaceName)
    except msgspec.DecodeError:  # a ValidationError is one too
        return None


def _short(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return text if len(data) <= MAX_TEXT_NBYTES else f"sha256:{hashlib.sha256(data).hexdigest()}"
