"""The llama-server inside the xllamacpp wheel, under the options of the program: for who has no llama.cpp built.

    python -m kvd_client.engines.llama_cpp.xllamacpp_server -m model.gguf -np 2 --port 8080

The server is llama.cpp's own; only these options are translated. `kvd llama-server` uses it when no llama-server is on
PATH.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
_FLASH_ATTENTION = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED", "1": "ENABLED", "0": "DISABLED"}

Apply = Callable[[Any, Any, str], None]
"""`apply(xllamacpp, params, value)`"""


def _plain(path: str, convert: Callable[[str], Any]) -> Apply:
    *owners, name = path.split(".")

    def apply(_module: Any, params: Any, value: str) -> None:
        for owner in owners:
            params = getattr(params, owner)
        setattr(params, name, convert(value))

    return apply


def _named(name: str, enum: str, prefix: str, values: dict[str, str]) -> Apply:
    def apply(module: Any, params: Any, value: str) -> None:
        setattr(params, name, getattr(getattr(module, enum), prefix + values[value.lower()]))

    return apply


_VALUES: dict[str, Apply] = {
    "-m --model": _plain("model.path", str),
    "-a --alias": _plain("model_alias", lambda text: set(text.split(","))),
    "-c --ctx-size": _plain("n_ctx", int),
    "-np --parallel": _plain("n_parallel", int),
    "-t --threads": _plain("cpuparams.n_threads", int),
    "-tb --threads-batch": _plain("cpuparams_batch.n_threads", int),
    "--poll": _plain("cpuparams.poll", int),
    "--poll-batch": _plain("cpuparams_batch.poll", int),
    "-b --batch-size": _plain("n_batch", int),
    "-ub --ubatch-size": _plain("n_ubatch", int),
    "-n --predict --n-predict": _plain("n_predict", int),
    "-ngl --gpu-layers --n-gpu-layers": _plain("n_gpu_layers", int),
    "-s --seed": _plain("sampling.seed", int),
    "--temp --temperature": _plain("sampling.temp", float),
    "-ctk --cache-type-k": _named("cache_type_k", "ggml_type", "GGML_TYPE_", _TYPES),
    "-ctv --cache-type-v": _named("cache_type_v", "ggml_type", "GGML_TYPE_", _TYPES),
    "-fa --flash-attn": _named("flash_attn_type", "llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", _FLASH_ATTENTION),
    "-cram --cache-ram": _plain("cache_ram_mib", int),
    "-lv --verbosity --log-verbosity": _plain("verbosity", int),
    "--api-key": _plain("api_keys", lambda text: text.split(",")),
    "--api-prefix": _plain("api_prefix", str),
    "--threads-http": _plain("n_threads_http", int),
    "--host": _plain("hostnames", lambda text: [text]),
    "--port": _plain("port", int),
    "--slot-save-path": _plain("slot_save_path", lambda text: text.rstrip("/") + "/"),
}
_FLAGS: dict[str, Apply] = {
    "-kvu --kv-unified": _plain("kv_unified", bool),
    "--swa-full": _plain("swa_full", bool),
    "--metrics": _plain("endpoint_metrics", bool),
    "--props": _plain("endpoint_props", bool),
    "--no-warmup": _plain("warmup", lambda _text: False),
}


def params_of(arguments: Sequence[str]) -> Any:
    """The parameters of the wheel. Raises `ValueError` naming what is not understood."""
    import xllamacpp

    values = {name: apply for names, apply in _VALUES.items() for name in names.split()}
    flags = {name: apply for names, apply in _FLAGS.items() for name in names.split()}
    params = xllamacpp.CommonParams()
    params.port = 8080
    words = iter(arguments)
    for word in words:
        if word in flags:
            flags[word](xllamacpp, params, "1")
            continue
        value = next(words, None)
        if word not in values or value is None:
            raise ValueError(f"{word} is not understood by the server in the xllamacpp wheel, or wants a value")
        try:
            values[word](xllamacpp, params, value)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{word} {value}: {error}") from error
    if not params.model.path:
        raise ValueError("-m names the model")
    if params.cpuparams_batch.n_threads <= 0:
        params.cpuparams_batch.n_threads = params.cpuparams.n_threads
    return params


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    # Blocked before the server starts its threads, so that one of them can't be the one that is interrupted.
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        params = params_of(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    import xllamacpp

    server = xllamacpp.Server(params)
    print(f"the server of the xllamacpp wheel listens on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait(stops)


if __name__ == "__main__":
    main()
