"""The command line of a llama-server: what the proxy takes over, what the server gets, what a snapshot depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.errors import InvalidRequest


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8080

_TAKEN: Final = {
    "--host": "LLAMA_ARG_HOST",
    "--port": "LLAMA_ARG_PORT",
    "--ssl-key-file": "LLAMA_ARG_SSL_KEY_FILE",
    "--ssl-cert-file": "LLAMA_ARG_SSL_CERT_FILE",
}
"""Options about where clients connect, which is the proxy now; each with the variable that stands for it."""
_SAVE_PATH: Final = "--slot-save-path"
_API_PREFIX: Final = "--api-prefix"
_API_KEY: Final = "--api-key"
_API_KEY_FILE: Final = "--api-key-file"

_HARMLESS_VALUES: Final = _words("""
    -m --model -mu --model-url -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -a --alias -t --threads -tb
    --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb
    --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -b --batch-size -ub --ubatch-size -n --predict
    --n-predict -s --seed --temp --temperature --top-k --top-p --min-p --typical --samplers --sampler-seq
    --sampling-seq --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --keep --log-file
    --log-verbosity -lv --verbosity --log-colors -to --timeout --threads-http --api-key --api-key-file --path
    --slot-save-path --api-prefix -cram --cache-ram -sps --slot-prompt-similarity --chat-template
    --chat-template-file --chat-template-kwargs --reasoning-format --reasoning-budget --sleep-idle-seconds
    """)
_HARMLESS_FLAGS: Final = _words("""
    -v --verbose --log-verbose --log-disable --log-prefix --log-timestamps --metrics --no-metrics --slots --no-slots
    --props --no-props --webui --no-webui --ui --no-ui --warmup --no-warmup --mlock --mmap --no-mmap --offline --jinja
    --no-jinja --perf --no-perf -cb --cont-batching -nocb --no-cont-batching --cache-prompt --no-cache-prompt
    --check-tensors --prefill-assistant --no-prefill-assistant --reuse-port
    """)
"""Options a state does not depend on: the model is told by its content, prompts by their tokens. Any other counts, so
that one nobody thought of costs a hit and never a wrong one.
"""
_HARMLESS_VARIABLES: Final = _words("""
    LLAMA_ARG_MODEL LLAMA_ARG_MODEL_URL LLAMA_ARG_HF_REPO LLAMA_ARG_HF_FILE LLAMA_ARG_ALIAS LLAMA_ARG_THREADS
    LLAMA_ARG_THREADS_BATCH LLAMA_ARG_BATCH LLAMA_ARG_UBATCH LLAMA_ARG_N_PREDICT LLAMA_ARG_TIMEOUT
    LLAMA_ARG_THREADS_HTTP LLAMA_ARG_CACHE_RAM LLAMA_ARG_CHAT_TEMPLATE LLAMA_ARG_CHAT_TEMPLATE_FILE
    LLAMA_ARG_JINJA LLAMA_ARG_ENDPOINT_METRICS LLAMA_ARG_ENDPOINT_SLOTS LLAMA_ARG_ENDPOINT_PROPS LLAMA_ARG_MLOCK
    LLAMA_ARG_NO_MMAP LLAMA_ARG_NO_WEBUI LLAMA_ARG_STATIC_PATH LLAMA_ARG_API_PREFIX LLAMA_ARG_CONT_BATCHING
    LLAMA_API_KEY LLAMA_CACHE LLAMA_OFFLINE
    """) | frozenset(_TAKEN.values())

_DRAFT: Final = _words("-md --model-draft -hfd -hfrd --hf-repo-draft --spec-type --spec-default")
_NO_COMPLETIONS: Final = _words("--embedding --embeddings --rerank --reranking --pooling")
_ROUTER: Final = _words("--models-dir --models-preset --models-preset-hf")
_REASONS: Final = (
    (_DRAFT, "LLAMA_ARG_MODEL_DRAFT", "a draft model keeps a state of its own, which a snapshot does not have"),
    (_NO_COMPLETIONS, "LLAMA_ARG_EMBEDDINGS", "this server computes embeddings"),
    (_ROUTER, "LLAMA_ARG_MODELS_DIR", "this server runs others, one for each model; run kvd llama-server for each"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command line, taken apart."""

    host: str
    port: int
    ssl_cert_file: str
    ssl_key_file: str
    api_prefix: str
    api_key: str
    """One that the server takes; empty when it asks for none."""
    slot_save_path: str
    """The user's own folder; empty without one, and then clients may not save slots."""
    for_server: tuple[str, ...]
    """Without what the proxy takes over."""
    identity: tuple[str, ...]
    """What a state depends on, with the environment's share."""
    why_not: str
    """Why there can be no snapshots; empty when there can."""


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Raises `InvalidRequest` for a taken option without its value, or a port that is none."""
    taken = {name: environ.get(variable, "") for name, variable in _TAKEN.items()}
    own = {
        _SAVE_PATH: environ.get("LLAMA_ARG_SLOT_SAVE_PATH", ""),
        _API_PREFIX: environ.get("LLAMA_ARG_API_PREFIX", ""),
        _API_KEY: environ.get("LLAMA_API_KEY", ""),
        _API_KEY_FILE: "",
    }
    for_server: list[str] = []
    identity: list[str] = []
    for name, value in _options(arguments):
        if name in taken:
            taken[name] = _required(name, value)
            continue
        for_server += [name] if value is None else [name, value]
        if name in own:
            own[name] = _required(name, value)
        elif name not in _HARMLESS_FLAGS and name not in _HARMLESS_VALUES:
            identity += [name] if value is None else [name, value]
    identity += _variables(environ)
    return Arguments(
        host=taken["--host"] or DEFAULT_HOST,
        port=_port(taken["--port"]),
        ssl_cert_file=taken["--ssl-cert-file"],
        ssl_key_file=taken["--ssl-key-file"],
        api_prefix=own[_API_PREFIX].rstrip("/"),
        api_key=_first_key(own[_API_KEY], own[_API_KEY_FILE]),
        slot_save_path=own[_SAVE_PATH],
        for_server=tuple(for_server),
        identity=tuple(identity),
        why_not=_why_not(arguments, environ),
    )


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Words with their values, where it is known that they have one; of other options each word by itself."""
    words = iter(arguments)
    for word in words:
        has_value = word in _TAKEN or word in _HARMLESS_VALUES
        yield word, next(words, None) if has_value else None


def _required(name: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequest(f"{name} wants a value")
    return value


def _port(text: str) -> int:
    try:
        port = int(text or DEFAULT_PORT)
    except ValueError:
        port = -1
    if not 0 <= port < 1 << 16:
        raise InvalidRequest(f"--port {text} is no port")
    return port


def _first_key(keys: str, file: str) -> str:
    if keys or not file:
        return keys.partition(",")[0]
    try:
        lines = Path(file).read_text().split()
    except OSError as error:
        raise InvalidRequest(f"{_API_KEY_FILE} {file}: {error.strerror}") from error
    return lines[0] if lines else ""


def _variables(environ: Mapping[str, str]) -> Iterable[str]:
    prefixes = ("LLAMA_", "GGML_")
    return (
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(prefixes)
        and name not in _HARMLESS_VARIABLES
        and not name.startswith(("LLAMA_LOG_", "LLAMA_ARG_LOG_", "LLAMA_ARG_SLOT_SAVE"))
    )


def _why_not(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    for options, variable, reason in _REASONS:
        if options.intersection(arguments) or environ.get(variable):
            return reason
    return ""
