"""Compiles Gemma 4 models ahead of time and runs them, on NVIDIA GPUs and on CPUs.

>>> import gemma4c
>>> model = gemma4c.Model("ggml-org/gemma-4-E4B-it-GGUF")
>>> print(model.chat([{"role": "user", "content": "Who is Mr. Darcy?"}]))

The program `gemma4c` is in this package too: `gemma4c --help`.
"""

import importlib.util
import os

from gemma4c import _gemma4c
from gemma4c._gemma4c import Completion, Error, Model, Stream, ToolCall, demo_model

__all__ = ["Completion", "Error", "Model", "Stream", "ToolCall", "demo_model"]


def _packages() -> "list[str]":
    """The folders that NVIDIA's packages were installed in, wherever this Python finds them."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return [os.path.dirname(place) for place in places or []]


_gemma4c.installed(_gemma4c.__file__, _packages())
