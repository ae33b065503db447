"""The example runs as its first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.llama_cpp.servers import OPTIONS, ROOT, model_path


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_second_server_reuses_what_the_first_has_computed(llama_daemon: Path) -> None:
    environ = {**os.environ, "KVD_RUNTIME_DIR": str(llama_daemon)}
    done = subprocess.run(
        [sys.executable, "clients/examples/llama_server.py", str(model_path()), *OPTIONS, "-c", "4096"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (int(reused) for reused in re.findall(r"(\d+) tokens reused", done.stdout))
    assert first == 0
    assert second > 700
