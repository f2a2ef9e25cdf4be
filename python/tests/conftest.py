"""What the tests share: the small trained model of the demo, and the program of this very installation."""

import os
import subprocess
import sysconfig

import pytest

import gemma4c


def start(*arguments, **more):
    """The installed program with these arguments, as a process."""
    program = os.path.join(sysconfig.get_path("scripts"), "gemma4c")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([program, *map(str, arguments)], text=True, **{**pipes, **more})


def run(*arguments, **more):
    """What a command prints that must work."""
    process = start(*arguments, **more)
    out, notes = process.communicate()
    assert process.returncode == 0, notes
    return out


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """No test finds plans of others, or leaves any."""
    folder = str(tmp_path_factory.mktemp("cache"))
    os.environ["GEMMA4C_CACHE"] = folder
    return folder


@pytest.fixture(scope="session")
def gguf(tmp_path_factory):
    return gemma4c.demo_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(gguf):
    return gemma4c.Model(gguf, device="cpu", context=512, quiet=True)
