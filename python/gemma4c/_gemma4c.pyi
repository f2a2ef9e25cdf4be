"""What the compiled part of the package has."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, Union, final, overload

import numpy
import numpy.typing
from typing_extensions import Self, TypeAlias

__all__ = ["Completion", "Error", "Model", "Stream", "ToolCall", "demo_model", "installed", "main"]

_Tokens: TypeAlias = Sequence[SupportsIndex]
_Prompt: TypeAlias = Union[str, _Tokens]
_Floats: TypeAlias = numpy.typing.NDArray[numpy.float32]

class Error(Exception):
    """Why a model cannot be found, compiled, opened or asked."""

@final
class ToolCall:
    """A call of a tool."""
    @property
    def name(self) -> str:
        """The tool's name."""
    @property
    def arguments(self) -> str:
        """A JSON object as text; of an answer that was cut, as far as it came."""

@final
class Completion:
    """An answer of a model; `str(completion)` is its text."""
    @property
    def text(self) -> str:
        """The text, up to a stop string."""
    @property
    def thoughts(self) -> str:
        """What the model thought before it answered, in a chat."""
    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tools that it calls."""
    @property
    def tokens(self) -> list[int]:
        """Ids of all tokens that were generated, without the one that ended the answer."""
    @property
    def finish_reason(self) -> Literal["stop", "length", "context", "tool_calls"]:
        """Why it ended."""
    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

@final
class Stream:
    """An answer as it comes: an iterator over pieces of its text."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> str: ...
    @property
    def completion(self) -> Completion | None:
        """The whole answer, once its last piece was read; None before that."""
    def close(self) -> None:
        """Ends the answer where it stands."""

@final
class Model:
    """A model with its weights, ready to answer.

    It is named by a GGUF file, by a plan that `gemma4c compile` wrote, or by its name on Hugging Face's hub.
    """
    def __new__(
        cls,
        model: str | os.PathLike[str],
        *,
        device: Literal["auto", "cuda", "cpu", "sim"] = "auto",
        context: int | None = None,
        sequences: int | None = None,
        kv: Literal["f16", "bf16", "f32", "q8_0", "fp8"] | None = None,
        memory: float | None = None,
        drafter: bool | str | os.PathLike[str] | None = None,
        quiet: bool = False,
    ) -> Self: ...
    # A text is an iterable of texts, too: the first that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Completion:
        """The answer to a prompt."""
    @overload
    def generate(
        self,
        prompt: _Tokens,
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Completion:
        """The answer to a prompt of token ids."""
    @overload
    def generate(
        self,
        prompt: Iterable[_Prompt],
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """The answers to many prompts, computed together."""
    def stream(
        self,
        prompt: _Prompt,
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Stream:
        """The answer to a prompt as it comes: an iterator over pieces of its text."""
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Completion:
        """The assistant's next message in a conversation, through the model's own chat template."""
    def logits(self, prompt: _Prompt) -> _Floats:
        """The logits after each token of a prompt: [tokens, vocabulary]."""
    def hidden_states(self, prompt: _Prompt) -> _Floats:
        """The residual before, between and after the layers: [layers + 1, tokens, width]."""
    def perplexity(self, text: str, *, window: int = 512) -> float:
        """How well the model predicts a text."""
    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, behind the one that begins a sequence."""
    def detokenize(self, tokens: _Tokens) -> str:
        """The text of token ids, without control tokens."""
    @property
    def device(self) -> str:
        """What runs it: "cpu", or what the driver calls the GPU."""
    @property
    def context(self) -> int:
        """Positions that a sequence may have, its prompt and its answer together."""
    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
    @property
    def sequences(self) -> int:
        """Sequences that are computed at once, at most."""
    def close(self) -> None:
        """Ends what is computed, and gives the memory back."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

def demo_model(folder: str | os.PathLike[str]) -> str:
    """Writes the model of `gemma4c demo` to a folder, and returns its path."""

def main(arguments: Sequence[str]) -> int:
    """Runs the program with these arguments, its own name first, and returns the code to exit with."""

def installed(module: str | os.PathLike[str], packages: Sequence[str | os.PathLike[str]]) -> None:
    """Says which file this module is, and in which folders NVIDIA's packages are."""
