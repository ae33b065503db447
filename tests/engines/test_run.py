"""`kvd run -- python script.py`: a script that knows nothing of kvd, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli.app import app

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(int(sys.argv[1]))
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, initializer_range=0.2, eos_token_id=None, pad_token_id=0, bos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(100)[None] % 127 + 1
for _ in range(2):
    print(model.generate(ids, max_new_tokens=10, do_sample=False)[0].tolist())
sys.exit(7)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*argv: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    folders = [*([str(python_path)] if python_path else []), str(ROOT), str(ROOT / "clients")]
    return subprocess.run(
        argv,
        env=environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def kvd_run(runtime_dir: Path, *command: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvd.cli", "run", "--runtime-dir", str(runtime_dir), "--", *command]
    return run(*argv, python_path=python_path)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("kvd run:")]


# case E1
def test_an_unchanged_script_shares_its_cache(runtime_dir: Path, script: Path) -> None:
    seed = str(os.getpid())
    plain = run(sys.executable, str(script), seed)
    assert plain.returncode == 7, plain.stderr
    for num_found in (0, 96):
        done = kvd_run(runtime_dir, sys.executable, str(script), seed)
        assert (done.returncode, done.stdout) == (7, plain.stdout), done.stderr
        assert said(done) == [
            f"kvd run: LlamaForCausalLM shares its KV cache; of the first prompt's 100 tokens {num_found} were there"
        ]


def test_without_a_daemon_the_script_runs_all_the_same(tmp_path: Path, script: Path) -> None:
    done = kvd_run(tmp_path / "nowhere", sys.executable, str(script), "1")
    assert done.returncode == 7, done.stderr
    assert len(done.stdout.splitlines()) == 2
    (line,) = said(done)
    assert "runs without the shared KV cache" in line
    assert "nowhere" in line


def test_an_interpreter_that_cannot_import_kvd_says_so(runtime_dir: Path, tmp_path: Path, script: Path) -> None:
    shadow = tmp_path / "shadow"
    (shadow / "kvd_client").mkdir(parents=True)
    (shadow / "kvd_client" / "__init__.py").write_text("raise ImportError('not here')")
    # The command itself must import it; only the script meets the shadow.
    source = f"exec(open({str(script)!r}).read())"
    inner = f"import sys; sys.path.insert(0, {str(shadow)!r}); sys.argv = ['script', '1']; {source}"
    done = kvd_run(runtime_dir, sys.executable, "-c", inner)
    assert done.returncode == 7, done.stderr
    assert len(said(done)) == 1
    assert "cannot import kvd_client (not here)" in said(done)[0]


def test_a_program_without_a_model_is_told_so_and_is_what_it_was(runtime_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the own one')")
    source = "import os, sys; print(sys.argv[1:], [m for m in sys.modules if m.startswith('kvd')]); sys.exit(3)"
    done = kvd_run(runtime_dir, sys.executable, "-c", source, "--runtime-dir", "x", python_path=tmp_path)
    assert done.returncode == 3, done.stderr
    # Before the script's output comes that of the interpreter's own sitecustomize, which ours makes way for; once for
    # the command and once for the script.
    assert done.stdout.splitlines() == ["the own one", "the own one", "['--runtime-dir', 'x'] []"]
    assert said(done) == ["kvd run: nothing attached: this program generated nothing with transformers"]


def test_a_child_of_the_program_says_nothing(runtime_dir: Path) -> None:
    source = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])"
    assert len(said(kvd_run(runtime_dir, sys.executable, "-c", source))) == 1


def test_a_command_there_is_not_is_one_line_and_an_exit_code() -> None:
    result = CliRunner().invoke(app, ["run", "--", "no-such-program-here"])
    assert result.exit_code == 2
    assert "no-such-program-here" in result.stderr
    assert CliRunner().invoke(app, ["run"]).exit_code == 2
