"""Imported by Python itself at its start when `kvd run` has put this folder onto PYTHONPATH. See site(7) of Python.

Nothing of kvd is imported before the program generates with transformers: a program that never does starts as quickly
as before. An own sitecustomize of the interpreter is run as it would have been.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_MODULE = "transformers.generation.utils"
_FOLDER = str(Path(__file__).parent)
_state = {"said": False}


def _say(sentence: str) -> None:
    _state["said"] = True
    sys.stderr.write(f"kvd run: {sentence}\n")


def _share(module: Any) -> None:
    original = module.GenerationMixin.generate

    def generate(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            from kvd_client.engines.transformers import everywhere
        except ImportError as error:
            if not _state["said"]:
                _say(f"runs without the shared KV cache: {sys.executable} cannot import kvd_client ({error})")
            return original(self, inputs, *args, **kwargs)
        _state["said"] = True
        return everywhere.generate(original, self, inputs, args, kwargs)

    generate.__doc__, generate.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    module.GenerationMixin.generate = generate


class _Watch(MetaPathFinder):
    """Waits for the one module, and is gone when it comes."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Its spec, with a loader that shares once the module is there; None for every other."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _share(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _at_exit() -> None:
    # Its child processes have the folder on their path too, and need not say that they generate nothing.
    if not _state["said"] and os.environ.get("KVD_RUN_PID") == str(os.getpid()):
        _say("nothing attached: this program generated nothing with transformers")


def _run_the_interpreters_own() -> None:
    if _FOLDER in sys.path:
        sys.path.remove(_FOLDER)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None and spec.origin != __file__:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Watch())
atexit.register(_at_exit)
_run_the_interpreters_own()
