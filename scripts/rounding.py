#!/usr/bin/env python3
"""What int8 activations cost, product by product: the relative rms error of W·x when x is rounded as decode rounds it.

Takes models with their reference files (NAME.gguf, NAME.golden.safetensors: the prompt is in `tokens`), lets `gemma4c logits` compute every
product's input on the CPU in f32, and rounds those inputs: to int8, 32 values to a scale, and with fine codes (codegen/src/kernels/quantise.rs).
A row of the table is all layers and all tokens of one product. Needs numpy, safetensors and gguf from PyPI; no GPU.

    scripts/rounding.py --binary target/release/gemma4c FOLDER/o_tiny_q8_0.gguf …
"""

import argparse
import pathlib
import subprocess
import tempfile

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import load_file

# A product's input in the graph, and its weights in the file.
PRODUCTS = [
    ("attention.normed", "attn_q"),
    ("attention.mixed", "attn_output"),
    ("mlp.normed", "ffn_gate"),
    ("mixture_of_experts.normed", "ffn_gate"),
    ("gated.product", "ffn_down"),
    ("mlp.out", "inp_gate"),
    ("per_layer_gate.product", "proj"),
]


def rounded(x, fine):
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    scale = largest / 127
    step = np.where(scale > 0, scale, 1)
    codes = np.rint(groups / step)
    values = codes * scale
    if fine:
        marked = (np.abs(codes) <= 4).sum(-1, keepdims=True) >= 12
        values = np.where(marked, values + np.rint((groups - values) / step * 32768) * step / 32768, values)
    return values.reshape(x.shape)


def check(binary, model, folder):
    golden = load_file(model.with_suffix("").with_suffix(".golden.safetensors"))
    weights = {t.name: t for t in GGUFReader(model).tensors}
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))
    plan, out = folder / "plan.bin", folder / "taps.safetensors"
    subprocess.run([binary, "compile", model, "-o", plan, "--target", "cpu"], check=True, capture_output=True)
    tokens = ",".join(map(str, golden["tokens"]))
    for value, tensor in PRODUCTS:
        taps = [word for layer in range(layers) for word in ("--tap", f"blk.{layer}.{value}")]
        command = [binary, "logits", plan, "--tokens", tokens, "--all", "-o", out, *taps]
        if subprocess.run(command, capture_output=True).returncode:
            continue  # No such value in this kind of model.
        inputs, errors, peaks = load_file(out), {False: [], True: []}, []
        for layer in range(layers):
            x = inputs[f"blk.{layer}.{value}"].astype(np.float64)
            found = weights[f"blk.{layer}.{tensor}.weight"]
            w = dequantize(found.data, found.tensor_type).astype(np.float64).T
            exact = x @ w
            size = np.sqrt((exact**2).mean(1))
            for fine, rows in errors.items():
                rows.append(np.sqrt(((rounded(x, fine) @ w - exact) ** 2).mean(1)) / size)
            peaks.append(np.abs(x).max(1) / np.sqrt((x**2).mean(1)))
        int8, fine = (100 * np.concatenate(errors[kind]) for kind in (False, True))
        print(f"| {model.stem} | {tensor} | {np.concatenate(peaks).max():.0f} | {int8.mean():.2f} % | {int8.max():.2f} % "
              f"| {fine.mean():.2f} % | {fine.max():.2f} % |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/gemma4c")
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    print("| model | product | largest value / rms, at most | int8: mean | worst row | with fine codes: mean | worst row |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            check(arguments.binary, model, pathlib.Path(folder))


if __name__ == "__main__":
    main()
