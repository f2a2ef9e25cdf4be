"""The program of the package, models by name, and what the package says of itself."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time

import pytest
from conftest import run, start

import gemma4c

STANDIN = os.environ.get("GEMMA4C_HUB_STANDIN")


def test_the_program_is_that_of_the_package():
    version = importlib.metadata.version("gemma4c")
    assert run("--version") == f"gemma4c {version}\n"
    module = subprocess.run([sys.executable, "-m", "gemma4c", "--version"], capture_output=True, text=True)
    assert module.stdout == f"gemma4c {version}\n"
    assert "Usage: gemma4c run [OPTIONS]" in run("run", "--help")


def test_codes_and_messages_are_those_of_the_program(tmp_path):
    refused = start("run", tmp_path / "nothing", "-p", "x")
    out, notes = refused.communicate()
    assert (refused.returncode, out) == (2, "") and notes.startswith("error: cannot read ")
    wrong = start("run", "--nonsense")
    _, notes = wrong.communicate()
    assert wrong.returncode == 2 and "unexpected argument '--nonsense'" in notes


def test_output_goes_through_a_pipe_that_closes(gguf):
    process = start("run", gguf, "--device", "cpu", "-p", "She was", "-n", "400", "--temp", "0")
    process.stdout.close()
    assert process.wait() == 0, process.stderr.read()


def test_ctrl_c_ends_the_program(gguf, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "She was"}\n' * 10000)
    # Whoever started this may have had it ignored.
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    line = ["run", gguf, "--device", "cpu", "--file", tmp_path / "prompts.jsonl", "-o", tmp_path / "answers"]
    process = start(*line, preexec_fn=heard)
    while not (tmp_path / "answers").exists():
        assert process.poll() is None
        time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT and time.monotonic() - started < 1.0


def test_a_plan_is_kept_for_the_module_and_for_the_program(gguf, tmp_path):
    own = {**os.environ, "GEMMA4C_CACHE": str(tmp_path)}
    assert gguf
    line = ["run", gguf, "--device", "cpu", "-p", "She was", "-n", "2", "--temp", "0"]
    first = start(*line, env=own).communicate()[1]
    assert "[compiled for this machine in " in first
    code = "import sys, gemma4c; gemma4c.Model(sys.argv[1], device='cpu')"
    again = subprocess.run([sys.executable, "-c", code, gguf], env=own, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert len(os.listdir(tmp_path / "plans")) == 1


def test_nvrtc_is_found_where_it_was_installed():
    """Whatever the environment says of it: a Python that runs by its path alone has no VIRTUAL_ENV."""
    pytest.importorskip("nvidia.cu13", reason="NVRTC's package is not installed")
    kept = {name: value for name, value in os.environ.items() if name not in ["GEMMA4C_NVRTC", "VIRTUAL_ENV"]}
    said = run("doctor", env=kept)
    packages = sysconfig.get_path("purelib")
    [line] = [line for line in said.splitlines() if line.startswith("nvrtc")]
    assert f" at {packages}/nvidia/cu13/lib/libnvrtc.so.13 (through the installed packages)" in line


@pytest.mark.skipif(STANDIN is None, reason="GEMMA4C_HUB_STANDIN names no stand-in of the hub")
def test_a_name_is_enough(gguf, tmp_path):
    repository = tmp_path / "hub" / "jane" / "austen-GGUF"
    repository.mkdir(parents=True)
    os.symlink(gguf, repository / "austen-Q4_0.gguf")
    hub = subprocess.Popen([STANDIN, str(tmp_path / "hub")], stdout=subprocess.PIPE, text=True)
    try:
        unset = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"]
        own = {name: value for name, value in os.environ.items() if name not in unset}
        own.update(HF_ENDPOINT=hub.stdout.readline().strip(), HF_HOME=str(tmp_path / "hf"))
        code = (
            "import json, gemma4c; model = gemma4c.Model('jane/austen-GGUF', device='cpu');"
            "print(json.dumps(model.generate('She was', max_tokens=12, seed=0).text))"
        )
        module = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
        assert module.returncode == 0, module.stderr
        assert "[fetched 6.44 MB in " in module.stderr
        line = ["run", "jane/austen-GGUF", "--device", "cpu", "-p", "She was", "-n", "12", "--seed", "0"]
        assert json.loads(module.stdout) + "\n" == run(*line, env=own)
        code = "import gemma4c; gemma4c.Model('jane/nothing', quiet=True)"
        missing = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
        assert missing.returncode == 1 and "gemma4c.Error: " in missing.stderr and "jane/nothing" in missing.stderr
    finally:
        hub.kill()
        hub.wait()


def test_everything_has_a_description():
    for name in gemma4c.__all__:
        thing = getattr(gemma4c, name)
        assert thing.__doc__, name
        for method in (vars(thing) if isinstance(thing, type) else {}):
            if not method.startswith("_"):
                assert getattr(thing, method).__doc__, f"{name}.{method}"
