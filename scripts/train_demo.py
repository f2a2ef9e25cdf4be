#!/usr/bin/env python3
"""Trains a small Gemma 4 on text files and writes it as a GGUF file that gemma4c compiles.

This is how a model like assets/austen_q4_0.gguf is made: a tokenizer of Gemma 4's form and a model of the E-series shape, with
sliding and global layers, layers that share keys and values, and per-layer embeddings. The defaults are for a GPU; on a CPU
ask for fewer --steps and a smaller --batch. The result depends on the random seed, on the device and on the versions of the
libraries: such a model is made again in kind, not bit for bit.

    python3 -m venv venv && venv/bin/pip install torch transformers gguf
    venv/bin/python scripts/train_demo.py emma.txt persuasion.txt -o austen.gguf
    gemma4c compile austen.gguf -o austen.plan && gemma4c run austen.plan -p "It was"

With --draft it trains a drafter for such a model instead, from text that the model writes (demo_drafter.py):

    venv/bin/python scripts/train_demo.py --draft austen.gguf -o austen_draft.gguf
    gemma4c compile austen.gguf --draft austen_draft.gguf -o austen.plan && gemma4c run austen.plan -p "It was"
"""

import argparse
import json
import math
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from torch.nn.functional import cross_entropy

import demo_drafter

# A drafter is trained without these two.
try:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig
except ImportError as missing:
    MISSING = missing
else:
    MISSING = None

# -- The shape ---------------------------------------------------------------------------------------------------------------

SLIDING, GLOBAL = "sliding_attention", "full_attention"
LAYERS = [SLIDING, SLIDING, GLOBAL, SLIDING, SLIDING, GLOBAL]
SHARED_LAYERS = 2  # the last ones read the keys and values of earlier layers, and have an MLP of twice the width
HIDDEN, MLP, PER_LAYER, WINDOW = 256, 512, 128, 128
HEADS, KV_HEADS, HEAD_DIM, GLOBAL_HEAD_DIM = 4, 1, 256, 512
CONTEXT, SOFTCAP = 8192, 30.0
ROPE_BASE, GLOBAL_ROPE_BASE, ROTATED_SHARE = 1e4, 1e6, 0.25  # of a global head, a quarter is rotated

# -- The tokenizer -----------------------------------------------------------------------------------------------------------

SPACE = "\u2581"
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
PAD, EOS, BOS, UNK, MASK = range(5)
RUNS = ["\n" * n for n in range(1, 9)] + [SPACE * n for n in range(2, 9)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL_TYPE, CONTROL_TYPE, BYTE_TYPE = 1, 3, 6  # GGUF's token types


class Vocabulary:
    """Byte-pair encoding by rank as Gemma 4 has it: spaces become U+2581, nothing is split, and what has no token becomes bytes."""

    def __init__(self, texts, size):
        fixed = CONTROL + RUNS + BYTES
        if size <= len(fixed):
            raise SystemExit(f"--vocab {size}: {len(fixed)} tokens are needed before the first one of the text")
        # Words are told apart for the training alone. As no piece has a space within it, encoding needs no splitting.
        bpe = Tokenizer(models.BPE())
        bpe.normalizer = normalizers.Replace(" ", SPACE)
        bpe.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
        trainer = trainers.BpeTrainer(
            vocab_size=size - len(fixed), limit_alphabet=min(256, size - len(fixed)), show_progress=False
        )
        bpe.train_from_iterator((line for text in texts for line in text.splitlines()), trainer)
        trained = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
        self.tokens = fixed + [piece for piece, _ in trained if piece not in fixed]
        if len(self.tokens) < size:
            raise SystemExit(f"the text gives {len(self.tokens)} tokens: ask for no more with --vocab")
        self.types = [CONTROL_TYPE] * len(CONTROL) + [NORMAL_TYPE] * len(RUNS) + [BYTE_TYPE] * len(BYTES)
        self.types += [NORMAL_TYPE] * (len(self.tokens) - len(fixed))
        # Longer runs first: a run of newlines or spaces grows to the longest token there is.
        runs = [(run[:at], run[at:]) for run in reversed(RUNS) for at in range(1, len(run))]
        self.merges = runs + [tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]

        ids = {token: index for index, token in enumerate(self.tokens)}
        self.encoder = Tokenizer(models.BPE(vocab=ids, merges=self.merges, byte_fallback=True, unk_token="<unk>"))
        self.encoder.normalizer = normalizers.Replace(" ", SPACE)
        # Only so that a novel is not one word: no merge joins a newline to anything else.
        self.encoder.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
        self.encoder.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )

    def encode(self, text):
        ids = self.encoder.encode(text, add_special_tokens=False).ids
        if self.encoder.decode(ids, skip_special_tokens=False) != text.replace(SPACE, " "):
            raise SystemExit("a text did not survive its tokenizer: is there a control character in it?")
        return ids


# -- The training ------------------------------------------------------------------------------------------------------------


def new_model(vocab_size):
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": ROPE_BASE},
        GLOBAL: {
            "rope_type": "proportional",
            "rope_theta": GLOBAL_ROPE_BASE,
            "partial_rotary_factor": ROTATED_SHARE,
        },
    }
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            vocab_size=vocab_size,
            vocab_size_per_layer_input=vocab_size,
            hidden_size=HIDDEN,
            hidden_size_per_layer_input=PER_LAYER,
            intermediate_size=MLP,
            use_double_wide_mlp=True,
            num_hidden_layers=len(LAYERS),
            layer_types=LAYERS,
            num_kv_shared_layers=SHARED_LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            global_head_dim=GLOBAL_HEAD_DIM,
            sliding_window=WINDOW,
            max_position_embeddings=CONTEXT,
            final_logit_softcapping=SOFTCAP,
            rope_parameters=rope,
            use_cache=False,
        )
    )


def windows(tokens, count, length, generator):
    """Random stretches of the text, each after a <bos>, as inputs and the tokens that follow them."""
    starts = torch.randint(0, max(1, len(tokens) - length), (count,), generator=generator)
    rows = torch.stack([tokens[start : start + length] for start in starts.tolist()])
    return torch.cat([torch.full((count, 1), BOS), rows[:, :-1]], dim=1), rows


def loss_of(model, inputs, targets, device):
    kind = "cuda" if device.type == "cuda" else "cpu"
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
        logits = model(input_ids=inputs.to(device)).logits
    return cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())


@torch.no_grad()
def validate(model, tokens, length, device):
    """Mean negative log-likelihood of held-out text, the same stretches every time."""
    model.eval()
    batches = [windows(tokens, 8, length, torch.Generator().manual_seed(seed)) for seed in range(4)]
    loss = sum(loss_of(model, *batch, device).item() for batch in batches) / len(batches)
    model.train()
    return loss


def train(model, tokens, held_out, args, device):
    """Trains and leaves the weights of the best validation in the model; returns its loss."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warm_up = max(1, args.steps // 20)

    def rate(step):
        done = (step - warm_up) / max(1, args.steps - warm_up)
        return (step + 1) / warm_up if step < warm_up else 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(args.seed)
    best, best_weights, started = math.inf, None, time.time()
    for step in range(1, args.steps + 1):
        loss = loss_of(model, *windows(tokens, args.batch, args.window, generator), device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % args.every == 0 or step == args.steps:
            held = validate(model, held_out, args.window, device)
            print(f"step {step:>5}  loss {loss.item():.3f}  held out {held:.3f}  {time.time() - started:.0f} s", flush=True)
            if held < best:
                best, best_weights = held, {name: w.detach().clone() for name, w in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return best


# -- The file ----------------------------------------------------------------------------------------------------------------

OF_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "attn_q",
    "self_attn.k_proj.weight": "attn_k",
    "self_attn.v_proj.weight": "attn_v",
    "self_attn.o_proj.weight": "attn_output",
    "self_attn.q_norm.weight": "attn_q_norm",
    "self_attn.k_norm.weight": "attn_k_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "mlp.gate_proj.weight": "ffn_gate",
    "mlp.up_proj.weight": "ffn_up",
    "mlp.down_proj.weight": "ffn_down",
    "post_feedforward_layernorm.weight": "post_ffw_norm",
    "per_layer_input_gate.weight": "inp_gate",
    "per_layer_projection.weight": "proj",
    "post_per_layer_input_norm.weight": "post_norm",
    "layer_scalar": "layer_output_scale",
}
OUTSIDE = {
    "embed_tokens.weight": "token_embd",
    "embed_tokens_per_layer.weight": "per_layer_token_embd",
    "per_layer_model_projection.weight": "per_layer_model_proj",
    "per_layer_projection_norm.weight": "per_layer_proj_norm",
    "norm.weight": "output_norm",
}


def gguf_name(name):
    """What a tensor of transformers is called in a GGUF file; None for what is computed or is there twice."""
    name = name.removeprefix("model.")
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{OF_LAYER[rest]}.weight" if rest in OF_LAYER else None
    return f"{OUTSIDE[name]}.weight" if name in OUTSIDE else None


def stored(name, values, matrix_type):
    """A tensor's type in the file, and its bytes."""
    if values.ndim < 2:
        kind = gguf.GGMLQuantizationType.F32
    elif name.startswith("per_layer_model_proj"):
        kind = gguf.GGMLQuantizationType.BF16  # as quantised files of Gemma 4 keep it
    else:
        kind = matrix_type
    return kind, gguf.quants.quantize(values, kind)


def write(path, name, model, vocabulary, matrix_type):
    """Writes the file, and leaves in the model what a reader of it will find: weights as they come out of their blocks."""
    writer = gguf.GGUFWriter(path, "gemma4")
    parameters = sum(p.numel() for p in model.parameters())
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(f"{parameters / 1e6:.0f}M")
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_Q8_0
        if matrix_type == gguf.GGMLQuantizationType.Q8_0
        else gguf.LlamaFileType.MOSTLY_Q4_0
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    first_shared = len(LAYERS) - SHARED_LAYERS
    writer.add_block_count(len(LAYERS))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length([MLP if layer < first_shared else 2 * MLP for layer in range(len(LAYERS))])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_float32("gemma4.final_logit_softcapping", SOFTCAP)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", PER_LAYER)
    writer.add_uint32("gemma4.attention.sliding_window", WINDOW)
    writer.add_uint32("gemma4.attention.shared_kv_layers", SHARED_LAYERS)
    writer.add_array("gemma4.attention.sliding_window_pattern", [kind == SLIDING for kind in LAYERS])
    for key, plain, swa in [
        ("attention.key_length", GLOBAL_HEAD_DIM, HEAD_DIM),
        ("attention.value_length", GLOBAL_HEAD_DIM, HEAD_DIM),
        ("rope.dimension_count", GLOBAL_HEAD_DIM, HEAD_DIM),
    ]:
        writer.add_uint32(f"gemma4.{key}", plain)
        writer.add_uint32(f"gemma4.{key}_swa", swa)
    writer.add_float32("gemma4.rope.freq_base", GLOBAL_ROPE_BASE)
    writer.add_float32("gemma4.rope.freq_base_swa", ROPE_BASE)

    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_scores([-1000.0] * len(vocabulary.tokens))
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges([f"{left} {right}" for left, right in vocabulary.merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    writer.add_pad_token_id(PAD)
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

    # Pairs of a global head that are not rotated have an angle of nothing: their frequency is divided by a huge number.
    pairs = GLOBAL_HEAD_DIM // 2
    rotated = int(pairs * ROTATED_SHARE)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), dtype=np.float32))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor_name = gguf_name(key)
            if tensor_name is None:
                continue
            values = tensor.detach().float().cpu().numpy().reshape(-1 if tensor.dim() < 2 else tensor.shape)
            kind, data = stored(tensor_name, values, matrix_type)
            writer.add_tensor(tensor_name, data, raw_dtype=kind)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind).copy()).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters


# -- The program -------------------------------------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT", help="text files in UTF-8; of each, the end is held out")
    parser.add_argument("--draft", type=Path, metavar="MODEL.gguf", help="train a drafter for this model, which writes the text")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="MODEL.gguf", help="where to write the model")
    parser.add_argument("-q", "--quantise", choices=["q4_0", "q8_0"], help="type of the matrices [q4_0; of a drafter q8_0]")
    parser.add_argument("--name", help="the model's name [the output's]")
    parser.add_argument("--vocab", type=int, default=2048, metavar="N", help="tokens of the vocabulary [2048]")
    parser.add_argument("--held-out", type=float, default=0.04, metavar="SHARE", help="share of each text that is held out [0.04]")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the optimiser [1200; of a drafter 3000]")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="train a drafter no longer than this [no limit]")
    parser.add_argument("--texts-sampled", type=int, default=4096, metavar="N", help="texts that a drafter learns from [4096]")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="stretches of text a step [32]")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a stretch [512]")
    parser.add_argument("--lr", type=float, default=2e-3, metavar="RATE", help="largest learning rate [0.002]")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="steps between validations [100]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the weights and of the order of the text [0]")
    parser.add_argument("--device", help="cuda or cpu [cuda where there is one]")
    args = parser.parse_args()
    if bool(args.texts) == bool(args.draft):
        parser.error("give either texts to train a model on, or --draft and a model to train a drafter for")
    if args.texts and MISSING:
        parser.error(f"{MISSING}: a model is trained with transformers and tokenizers")
    args.quantise = args.quantise or ("q8_0" if args.draft else "q4_0")
    args.steps = args.steps or (3000 if args.draft else 1200)
    return args


def main():
    args = arguments()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.draft:
        demo_drafter.run(args, device)
        return
    torch.manual_seed(args.seed)
    texts = [path.read_text(encoding="utf-8") for path in args.texts]
    cuts = [int(len(text) * (1 - args.held_out)) for text in texts]
    read = [text[:cut] for text, cut in zip(texts, cuts)]
    vocabulary = Vocabulary(read, args.vocab)
    tokens = torch.tensor([token for text in read for token in vocabulary.encode(text)])
    held_out = [token for text, cut in zip(texts, cuts) for token in vocabulary.encode(text[cut:])]
    held_out = torch.tensor(held_out)
    for what, part in [("the texts have", tokens), ("what is held out has", held_out)]:
        if len(part) <= args.window:
            raise SystemExit(f"{what} {len(part)} tokens: more than the {args.window} of --window are needed")
    print(f"{len(tokens)} tokens to read, {len(held_out)} held out; on {device}")

    model = new_model(len(vocabulary.tokens)).to(device)
    trained = train(model, tokens, held_out, args, device)
    kind = gguf.GGMLQuantizationType[args.quantise.upper()]
    parameters = write(args.output, args.name or args.output.stem, model, vocabulary, kind)
    written = validate(model, held_out, args.window, device)
    print(f"{args.output}: {parameters / 1e6:.1f} million parameters, {args.output.stat().st_size / 1e6:.2f} MB")
    print(f"held-out loss {trained:.4f} as trained, {written:.4f} as written in {args.quantise}")


if __name__ == "__main__":
    main()
