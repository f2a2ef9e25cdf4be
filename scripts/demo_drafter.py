"""Trains a drafter for a small Gemma 4 of the E-series shape; `train_demo.py --draft MODEL.gguf` runs it.

The drafter learns from the model's own text. The model samples it, and the hidden states, keys and values that a drafter reads are
what this sampling leaves behind. Every position of every text is then a round: the drafter takes the token there and the hidden
state before it, and drafts several tokens. Each step is fed the text's token, which is the drafter's own wherever the step
matters: a round ends at the first draft that differs. The hidden state is always the drafter's own.

Neither transformers nor a tokenizer is needed: the model is computed here, from its file.
"""

import math
import time

import gguf
import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, linear, log_softmax, softmax

# -- The shape of the drafter ------------------------------------------------------------------------------------------------

SLIDING_PATTERN = [True, True, True, False]
WIDTH, MLP, HEADS = 128, 256, 2
EPSILON = 1e-6

# -- What a round is trained on ----------------------------------------------------------------------------------------------

STEPS = 5  # drafts of a round
TEMPERATURES = [0.0, 0.7, 1.0]  # of the sampled texts, in equal parts; the demo samples at the second
STARTING_TOKENS = 8  # at a temperature of 1 in every text, so that those of temperature 0 differ
TOP_K = 40
CONTROL_TOKENS = 7  # the first of the vocabulary; a text goes on to its full length without them
BOS = 2
LABEL_TEMPERATURE = 0.5  # below 1, since only the likeliest token is drafted
DEAD_WEIGHT = 0.1  # of a step behind a wrong draft, where one behind right drafts has 1
CHECKED_TOKENS = 40


def rms_norm(x, weight=None):
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    return x if weight is None else x * weight


def rotate(x, angles):
    """RoPE of [..., positions, heads, size] by angles [positions, size / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def attend(q, keys, values, admitted):
    """Softmax attention without a scale: q [batch, rows, heads, size] over keys [batch, length, size] of one KV head."""
    batch, rows, heads, size = q.shape
    scores = (q.reshape(batch, rows * heads, size) @ keys.mT).view(batch, rows, heads, -1)
    shares = softmax(scores.float().masked_fill(~admitted[:, None], -math.inf), dim=-1)
    return (shares.to(values.dtype).flatten(1, 2) @ values).view(batch, rows, heads * size)


def mlp(x, gate, up, down):
    return linear(gelu(linear(x, gate), approximate="tanh") * linear(x, up), down)


# -- The model ---------------------------------------------------------------------------------------------------------------


class Target:
    """The model of a GGUF file, in plain tensors: what it computes at each position, and the keys and values it keeps."""

    def __init__(self, path, device):
        reader = gguf.GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        if architecture != "gemma4":
            raise SystemExit(f"{path}: the architecture is {architecture}, expected gemma4")
        fields = {key.removeprefix("gemma4."): field for key, field in reader.fields.items()}
        number = lambda key: fields[key].contents()
        if number("attention.head_count_kv") != 1:
            raise SystemExit(f"{path}: only models with one KV head are drafted for here")
        self.name = fields["general.name"].contents() if "general.name" in fields else path.stem
        self.tokens = fields["tokenizer.ggml.tokens"].contents()
        self.sliding = number("attention.sliding_window_pattern")
        self.owners = len(self.sliding) - number("attention.shared_kv_layers")
        self.width, self.window = number("embedding_length"), number("attention.sliding_window")
        self.heads, self.softcap = number("attention.head_count"), number("final_logit_softcapping")
        self.per_layer, self.context = number("embedding_length_per_layer_input"), number("context_length")
        self.sizes = {True: number("attention.key_length_swa"), False: number("attention.key_length")}
        self.bases = {True: number("rope.freq_base_swa"), False: number("rope.freq_base")}
        self.weights = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self.weights[tensor.name] = torch.from_numpy(values.astype(np.float32)).to(device)
        self.embedding, self.device = self.weights["token_embd.weight"], device
        # The last layer of each kind that has keys of its own: a layer without them reads its, and so does the drafter.
        self.donors = {kind: layer for layer, kind in enumerate(self.sliding[: self.owners])}

    def angles(self, positions, is_sliding):
        size = self.sizes[is_sliding]
        exponents = torch.arange(0, size, 2, device=self.device, dtype=torch.float64) / size
        frequencies = self.bases[is_sliding] ** -exponents
        if not is_sliding:
            frequencies = frequencies / self.weights["rope_freqs.weight"]
        return (positions[:, None] * frequencies).float()

    def new_cache(self, count, length):
        """Zeroed keys and values of each layer that has some, and the hidden states that the LM head reads."""
        sizes = [self.sizes[kind] for kind in self.sliding[: self.owners]]
        zeros = lambda size: torch.zeros(count, length, size, device=self.device)
        return [(zeros(size), zeros(size)) for size in sizes], zeros(self.width)

    @torch.no_grad()
    def read(self, tokens, start, cache):
        """Computes tokens [count, length] at the positions from `start` on, and leaves all of it in the cache."""
        (count, length), w = tokens.shape, self.weights
        positions = torch.arange(start, start + length, device=self.device)
        seen = torch.arange(start + length, device=self.device)
        x = self.embedding[tokens] * math.sqrt(self.width)
        layers = len(self.sliding)
        table = w["per_layer_token_embd.weight"][tokens].view(count, length, layers, self.per_layer)
        projected = linear(x, w["per_layer_model_proj.weight"]).view(count, length, layers, self.per_layer)
        projected = rms_norm(projected / math.sqrt(self.width), w["per_layer_proj_norm.weight"])
        per_layer = (projected + table * math.sqrt(self.per_layer)) / math.sqrt(2)
        for layer, kind in enumerate(self.sliding):
            of = lambda name: w[f"blk.{layer}.{name}.weight"]
            size, angles = self.sizes[kind], self.angles(positions, kind)
            n = rms_norm(x, of("attn_norm"))
            q = linear(n, of("attn_q")).view(count, length, self.heads, size)
            q = rotate(rms_norm(q, of("attn_q_norm")), angles)
            keys, values = cache[0][layer if layer < self.owners else self.donors[kind]]
            if layer < self.owners:
                k = rms_norm(linear(n, of("attn_k")), of("attn_k_norm"))
                keys[:, start : start + length] = rotate(k[:, :, None], angles)[:, :, 0]
                values[:, start : start + length] = rms_norm(linear(n, of("attn_v")))
            admitted = admitted_keys(positions, seen, self.window if kind else None)
            o = attend(q, keys[:, : len(seen)], values[:, : len(seen)], admitted)
            x = x + rms_norm(linear(o, of("attn_output")), of("post_attention_norm"))
            m = rms_norm(x, of("ffn_norm"))
            x = x + rms_norm(mlp(m, of("ffn_gate"), of("ffn_up"), of("ffn_down")), of("post_ffw_norm"))
            gated = gelu(linear(x, of("inp_gate")), approximate="tanh") * per_layer[:, :, layer]
            x = x + rms_norm(linear(gated, of("proj")), of("post_norm"))
            x = x * of("layer_output_scale")
        cache[1][:, start : start + length] = rms_norm(x, w["output_norm.weight"])

    def logits(self, hidden):
        return self.softcap * torch.tanh(linear(hidden, self.embedding) / self.softcap)


def admitted_keys(positions, seen, window):
    """Which keys each position sees: those up to its own, and of a sliding layer the last `window` of them."""
    distance = positions[:, None] - seen
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class Texts:
    """Texts that a model has written: their temperatures, tokens and what a drafter reads of the model at each position."""

    def __init__(self, target, count, length, generator):
        kinds = torch.tensor(TEMPERATURES, device=target.device)
        self.temperatures = kinds[torch.arange(count, device=target.device) % len(kinds)]
        self.tokens = torch.full((count, length), BOS, device=target.device)
        cache = target.new_cache(count, length)
        for position in range(length):
            target.read(self.tokens[:, position : position + 1], position, cache)
            if position + 1 < length:
                logits = target.logits(cache[1][:, position])
                self.tokens[:, position + 1] = self.pick(logits, position, generator)
        self.hidden = cache[1]
        self.kept = {kind: cache[0][layer] for kind, layer in target.donors.items()}

    def pick(self, logits, position, generator):
        logits[:, :CONTROL_TOKENS] = -math.inf
        best, ids = logits.topk(TOP_K, dim=-1)
        starting = torch.ones_like(self.temperatures)
        temperatures = starting if position < STARTING_TOKENS else self.temperatures
        # Temperature 0 is one so low that only the best is left.
        shares = softmax(best / temperatures.clamp(min=1e-4)[:, None], dim=-1)
        return ids.gather(1, torch.multinomial(shares, 1, generator=generator))[:, 0]


# -- The drafter -------------------------------------------------------------------------------------------------------------


class Drafter(nn.Module):
    """Four layers with queries only, over the keys and values of the model. Parameters have their names in the file, `.` as `_`."""

    def __init__(self, target):
        super().__init__()
        self.target, self.names = target, []
        matrix = lambda name, rows, columns: self.add(name, torch.randn(rows, columns) / math.sqrt(columns))
        matrix("token_embd", len(target.tokens), WIDTH)
        matrix("nextn.pre_projection", WIDTH, 2 * target.width)
        matrix("nextn.post_projection", target.width, WIDTH)
        self.add("output_norm", torch.ones(WIDTH))
        for layer, kind in enumerate(SLIDING_PATTERN):
            size = target.sizes[kind]
            matrix(f"blk.{layer}.attn_q", HEADS * size, WIDTH)
            matrix(f"blk.{layer}.attn_output", WIDTH, HEADS * size)
            matrix(f"blk.{layer}.ffn_gate", MLP, WIDTH)
            matrix(f"blk.{layer}.ffn_up", MLP, WIDTH)
            matrix(f"blk.{layer}.ffn_down", WIDTH, MLP)
            for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]:
                self.add(f"blk.{layer}.{norm}", torch.ones(WIDTH))
            # Queries begin as large as those that the keys were made for: attention has no other scale.
            scale = target.weights[f"blk.{target.donors[kind]}.attn_q_norm.weight"]
            self.add(f"blk.{layer}.attn_q_norm", scale.cpu().clone())
            self.add(f"blk.{layer}.layer_output_scale", torch.ones(1))

    def add(self, name, values):
        self.register_parameter(name.replace(".", "_"), nn.Parameter(values))
        self.names.append(name)

    def named(self):
        """Parameters by the names that they have in the file."""
        return ((name, getattr(self, name.replace(".", "_"))) for name in self.names)

    def step(self, tokens, hidden, round_of):
        """One draft for each row: logits, and the hidden state of the next step. `tokens` come next and have not been read."""
        w = dict(self.named())
        embedded = self.target.embedding[tokens] * math.sqrt(self.target.width)
        x = linear(torch.cat([embedded, hidden], dim=-1), w["nextn.pre_projection"])
        batch, rows, _ = x.shape
        for layer, kind in enumerate(SLIDING_PATTERN):
            of = lambda name: w[f"blk.{layer}.{name}"]
            keys, values, admitted, angles = round_of[kind]
            q = linear(rms_norm(x, of("attn_norm")), of("attn_q")).view(batch, rows, HEADS, -1)
            q = rotate(rms_norm(q, of("attn_q_norm")), angles)
            o = attend(q.to(keys.dtype), keys, values, admitted)
            x = x + rms_norm(linear(o, of("attn_output")), of("post_attention_norm"))
            m = rms_norm(x, of("ffn_norm"))
            x = x + rms_norm(mlp(m, of("ffn_gate"), of("ffn_up"), of("ffn_down")), of("post_ffw_norm"))
            x = x * of("layer_output_scale")
        normed = rms_norm(x, w["output_norm"])
        return linear(normed, w["token_embd"]).float(), linear(normed, w["nextn.post_projection"]).float()

    def round_of(self, kept, positions, dtype):
        """What all steps of a round from each position share, by kind of layer: keys, values, which are seen, the rotation."""
        shared = {}
        for kind, (keys, values) in kept.items():
            seen = torch.arange(keys.shape[1], device=keys.device)
            # As the model would look from the position, whose own key is not there yet.
            admitted = admitted_keys(positions, seen, self.target.window if kind else None) & (seen < positions[:, None])
            shared[kind] = keys.to(dtype), values.to(dtype), admitted, self.target.angles(positions, kind)
        return shared

    def draft(self, texts, which, dtype):
        """Rounds from all positions of some texts, fed the tokens of the text: for each step its logits, and the tokens it should give."""
        tokens, hidden = texts.tokens[which], texts.hidden[which]
        rows = tokens.shape[1] - STEPS
        positions = torch.arange(1, rows, device=tokens.device)
        kept = {kind: (keys[which], values[which]) for kind, (keys, values) in texts.kept.items()}
        round_of, state = self.round_of(kept, positions, dtype), hidden[:, : rows - 1]
        for step in range(STEPS):
            logits, state = self.step(tokens[:, 1 + step : rows + step], state, round_of)
            # The model's own state at the token that was fed says what it wants next.
            yield logits, tokens[:, 2 + step : rows + 1 + step], hidden[:, 1 + step : rows + step]


# -- The training ------------------------------------------------------------------------------------------------------------


def loss_of(drafter, texts, which, device):
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    total, alive = 0.0, 1.0
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
        for logits, follows, hidden in drafter.draft(texts, which, dtype):
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                wanted = softmax(drafter.target.logits(hidden) / LABEL_TEMPERATURE, dim=-1)
            losses = -(wanted * log_softmax(logits, dim=-1)).sum(-1)
            total = total + ((DEAD_WEIGHT + (1 - DEAD_WEIGHT) * alive) * losses).mean()
            alive = alive * (logits.argmax(-1) == follows)
    return total / STEPS


@torch.no_grad()
def accepted(drafter, texts, which):
    """Of the rounds of some texts, the share whose first 1, 2, ... drafts are all what the text goes on with."""
    shares, alive = [], 1.0
    for logits, follows, _ in drafter.draft(texts, which, torch.float32):
        alive = alive * (logits.argmax(-1) == follows)
        shares.append(alive.float().mean().item())
    return shares


def train(drafter, texts, held_out, args, device):
    """Trains for --steps, or for --seconds if that is sooner."""
    torch.set_float32_matmul_precision("high")  # what is not in bfloat16 may be in TF32 here
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    started, done, step = time.time(), 0.0, 0
    trained_on = len(texts.tokens) - held_out
    while done < 1:
        warm_up = min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        which = torch.randint(0, trained_on, (args.batch,), generator=generator).to(device)
        loss = loss_of(drafter, texts, which, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % args.every == 0:
            print(f"step {step:>5}  loss {loss.item():.3f}  {time.time() - started:.0f} s", flush=True)
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # else the clock is ahead of the work
        done = max(step / args.steps, (time.time() - started) / args.seconds)
    torch.set_float32_matmul_precision("highest")
    return step


# -- The file ----------------------------------------------------------------------------------------------------------------


def write(path, drafter, kind):
    """Writes the drafter, and leaves in it what a reader of the file will find: weights as they come out of their blocks."""
    target, arch = drafter.target, "gemma4-assistant"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("model")
    writer.add_name(f"{target.name} drafter")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    layers, global_size, sliding_size = len(SLIDING_PATTERN), target.sizes[False], target.sizes[True]
    for key, value in [
        ("block_count", layers),
        ("nextn_predict_layers", layers),
        ("attention.shared_kv_layers", layers),
        ("context_length", target.context),
        ("embedding_length", WIDTH),
        ("embedding_length_out", target.width),
        ("embedding_length_per_layer_input", 0),
        ("feed_forward_length", MLP),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", 1),
        ("attention.sliding_window", target.window),
        ("attention.key_length", global_size),
        ("attention.key_length_swa", sliding_size),
        ("attention.value_length", global_size),
        ("attention.value_length_swa", sliding_size),
        ("rope.dimension_count", global_size),
        ("rope.dimension_count_swa", sliding_size),
    ]:
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", EPSILON)
    writer.add_float32(f"{arch}.rope.freq_base", target.bases[False])
    writer.add_float32(f"{arch}.rope.freq_base_swa", target.bases[True])
    writer.add_array(f"{arch}.attention.sliding_window_pattern", SLIDING_PATTERN)
    # Only to be compared with the model's.
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(target.tokens)

    writer.add_tensor("rope_freqs.weight", target.weights["rope_freqs.weight"].cpu().numpy())
    with torch.no_grad():
        for name, tensor in drafter.named():
            values = tensor.detach().float().cpu().numpy()
            stored_as = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            data = gguf.quants.quantize(values, stored_as)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=stored_as)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, stored_as).copy()).view_as(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def drafted(drafter, tokens):
    """The drafts behind the last of some tokens, which is not read: each step is fed the draft before it."""
    target = drafter.target
    tokens = tokens[None]
    cache = target.new_cache(1, tokens.shape[1] - 1)
    target.read(tokens[:, :-1], 0, cache)
    position = torch.tensor([tokens.shape[1] - 1], device=target.device)
    kept = {kind: cache[0][layer] for kind, layer in target.donors.items()}
    round_of, state, token = drafter.round_of(kept, position, torch.float32), cache[1][:, -1:], tokens[:, -1:]
    drafts = []
    for _ in range(STEPS):
        logits, state = drafter.step(token, state, round_of)
        token = logits.argmax(-1)
        drafts.append(token.item())
    return drafts


# -- The program -------------------------------------------------------------------------------------------------------------


def run(args, device):
    began = time.time()
    target = Target(args.draft, device)
    torch.manual_seed(args.seed)
    # Texts are sampled and drafters judged in full precision; only the training is not.
    held_out = max(len(TEMPERATURES), args.texts_sampled // 32)
    generator = torch.Generator(device).manual_seed(args.seed)
    texts = Texts(target, args.texts_sampled, args.window, generator)
    print(f"{args.texts_sampled} texts of {args.window} tokens in {time.time() - began:.0f} s on {device}", flush=True)

    drafter = Drafter(target).to(device)
    steps = train(drafter, texts, held_out, args, device)
    write(args.output, drafter, gguf.GGMLQuantizationType[args.quantise.upper()])
    parameters, size = sum(p.numel() for p in drafter.parameters()), args.output.stat().st_size
    print(f"{args.output}: {parameters / 1e6:.2f} million parameters, {size / 1e6:.2f} MB, {steps} steps")
    # On texts that it has not read, as written.
    unread = torch.arange(len(texts.tokens) - held_out, len(texts.tokens), device=device)
    for temperature in TEMPERATURES:
        which = unread[(texts.temperatures[unread] - temperature).abs() < 1e-3]
        shares = [0.0] * STEPS
        for some in which.split(16):
            shares = [a + b * len(some) / len(which) for a, b in zip(shares, accepted(drafter, texts, some))]
        rates = " ".join(f"{100 * share:.1f}" for share in shares)
        print(f"temperature {temperature}: first drafts right in {rates} % of rounds, {1 + sum(shares):.2f} tokens a round")
    tokens = texts.tokens[-1][:CHECKED_TOKENS]
    listed = ",".join(str(token) for token in tokens.tolist())
    print(f"check with: gemma4c logits PLAN --tokens {listed} --draft {STEPS} -o drafts.safetensors")
    print(f"draft.tokens must be {drafted(drafter, tokens)}; {time.time() - began:.0f} s in all")
