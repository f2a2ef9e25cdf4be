"""What the module answers is what the program answers."""

import json
import pathlib
import struct
import subprocess
import sys
import threading
import time

import numpy
import pytest
from conftest import run

import gemma4c

PROMPTS = ["The carriage", "Her sister was", '"My dear Emma,', "It was", "No", "Mr. Elton", "", "And", "She", "He", "In the"]
SETTINGS = {"max_tokens": 20, "temperature": 0.8, "top_k": 40, "seed": 5, "stop": "."}
FLAGS = ["-n", 20, "--temp", 0.8, "--top-k", 40, "--seed", 5]
TEMPLATE = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "google-gemma-4-31B-it.jinja"
PROSE = "It was not in her power to be of any use to them, and she knew that she could not be so. " * 8


def on_cpu(gguf):
    return [gguf, "--device", "cpu", "--ctx", 512]


def test_an_answer_is_that_of_the_program(model, gguf):
    for prompt in ["She was", "The carriage"]:
        said = run("run", *on_cpu(gguf), *FLAGS, "--stop", ".", "-p", prompt)
        answer = model.generate(prompt, **SETTINGS)
        assert answer.text + "\n" == said == str(answer) + "\n"
    said = json.loads(run("run", *on_cpu(gguf), *FLAGS, "--json", "-p", "She was"))
    answer = model.generate("She was", **{**SETTINGS, "stop": None})
    found = (answer.text, answer.tokens, answer.finish_reason, answer.prompt_tokens)
    assert found == (said["text"], said["tokens"], said["finish_reason"], said["prompt_tokens"])
    assert len(answer.tokens) == 20 and answer.finish_reason == "length"


def test_a_batch_is_its_prompts_one_by_one_and_that_of_the_program(model, gguf, tmp_path):
    batch = model.generate(PROMPTS, **SETTINGS)
    assert batch == [model.generate(prompt, **SETTINGS) for prompt in PROMPTS]
    assert {answer.finish_reason for answer in batch} == {"stop", "length"}
    lines = [json.dumps({"prompt": prompt, "stop": "."}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    said = run("run", *on_cpu(gguf), *FLAGS, "--file", tmp_path / "prompts.jsonl", "-o", "-")
    said = [json.loads(line) for line in said.splitlines()]
    assert [(answer["text"], answer["tokens"]) for answer in said] == [(answer.text, answer.tokens) for answer in batch]
    assert model.generate([]) == []


def test_token_ids_are_a_prompt(model):
    tokens = model.tokenize("She was")
    answer = model.generate("She was", max_tokens=6, temperature=0)
    assert model.generate(tokens, max_tokens=6, temperature=0) == answer
    assert model.generate(numpy.array(tokens), max_tokens=6, temperature=0) == answer
    assert model.generate([tokens, "She was"], max_tokens=6, temperature=0) == [answer, answer]


def test_a_stream_joins_to_the_answer(model):
    answer = model.generate("She was", **SETTINGS)
    stream = model.stream("She was", **SETTINGS)
    assert stream.completion is None
    pieces = list(stream)
    assert "".join(pieces) == answer.text and len(pieces) > 1
    assert stream.completion == answer
    assert list(stream) == []
    # One that is left half-way, and one that nobody reads, are nobody's business.
    left = model.stream("It is a truth", max_tokens=400)
    assert next(left)
    left.close()
    assert list(left) == [] and left.completion is None
    model.stream("It is a truth", max_tokens=400)
    assert model.generate("She was", **SETTINGS) == answer


def test_a_chat_is_that_of_the_program(gguf, tmp_path):
    path = tmp_path / "tiny.gguf"
    run("synth", "tiny-e", "-q", "q8_0", "-o", path)
    line = ["--seed", 3, "-n", 12, "--chat", "--system", "Be <turn|> brief.", "-p", "Who wrote Emma?", "--json"]
    said = json.loads(run("run", path, "--device", "cpu", "--ctx", 256, *line))
    messages = [{"role": "system", "content": "Be <turn|> brief."}, {"role": "user", "content": "Who wrote Emma?"}]
    with gemma4c.Model(path, device="cpu", context=256, quiet=True) as tiny:
        answer = tiny.chat(messages, seed=3, max_tokens=12)
        assert (answer.tokens, answer.text, answer.prompt_tokens) == (said["tokens"], said["text"], said["prompt_tokens"])


def with_template(gguf, template):
    """The model with another chat template. Its header grows by whole blocks, so that tensors stay aligned."""
    key = b"tokenizer.chat_template"
    at = gguf.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    kind, length = struct.unpack_from("<IQ", gguf, at)
    assert kind == 8, "a text"
    template += b"{#" + b" " * ((length - len(template) - 4) % 32) + b"#}"
    return gguf[:at] + struct.pack("<IQ", kind, len(template)) + template + gguf[at + 12 + length :]


def test_a_chat_may_have_tools(tmp_path):
    path = tmp_path / "tiny.gguf"
    run("synth", "tiny-e", "-q", "q8_0", "-o", path)
    path.write_bytes(with_template(path.read_bytes(), TEMPLATE.read_bytes()))
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    messages = [{"role": "user", "content": "Is it raining in Bath?"}]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bath"}}}]
    result = {"role": "tool", "name": "weather", "content": "It is."}
    with gemma4c.Model(path, device="cpu", context=1024, quiet=True) as tiny:
        settings = {"max_tokens": 2, "seed": 1}
        asked = tiny.chat(messages, tools=tools, **settings)
        assert asked.prompt_tokens > tiny.chat(messages, **settings).prompt_tokens and asked.tool_calls == []
        assert tiny.chat(messages, tools=tools, thinking=True, **settings).prompt_tokens != asked.prompt_tokens
        told = [*messages, {"role": "assistant", "tool_calls": calls}, result]
        assert tiny.chat(told, tools=tools, **settings).prompt_tokens > asked.prompt_tokens
        with pytest.raises(gemma4c.Error, match=r"tools\[0\]\.function\.name must be a text"):
            tiny.chat(messages, tools=[{"type": "function", "function": {}}])
        with pytest.raises(gemma4c.Error, match=r"messages\[1\] is a tool's result without its call"):
            tiny.chat([*messages, result])


def test_logits_are_those_that_perplexity_scores(model, gguf, tmp_path):
    window = 32
    tokens = model.tokenize(PROSE)
    nll = []
    for start in range(0, len(tokens) - window + 1, window):
        part = [tokens[0], *tokens[start + 1 : start + window]]
        rows = model.logits(part[:-1]).astype(numpy.float64)
        assert rows.shape == (window - 1, model.vocab_size)
        largest = rows.max(axis=1, keepdims=True)
        log_sum = numpy.log(numpy.exp(rows - largest).sum(axis=1)) + largest[:, 0]
        nll += [log_sum[at - 1] - rows[at - 1, part[at]] for at in range(window // 2 + 1, window)]
    perplexity = model.perplexity(PROSE, window=window)
    assert perplexity == pytest.approx(numpy.exp(numpy.mean(nll)), rel=1e-9)
    (tmp_path / "prose.txt").write_text(PROSE)
    run("compile", gguf, "--target", "cpu", "--ctx", 512, "-o", tmp_path / "plan.bin")
    line = ["perplexity", tmp_path / "plan.bin", "--file", tmp_path / "prose.txt", "--window", window, "-o", "json"]
    assert perplexity == pytest.approx(json.loads(run(*line))["perplexity"], rel=1e-12)
    assert int(model.logits("She was")[-1].argmax()) == model.generate("She was", max_tokens=1, temperature=0).tokens[0]


def test_hidden_states_are_the_values_that_the_program_taps(model, gguf, tmp_path):
    states = model.hidden_states("She was not at all")
    tokens = model.tokenize("She was not at all")
    layers = states.shape[0] - 1
    assert states.shape[1] == len(tokens) and states.dtype == numpy.float32 and states.flags.writeable
    names = ["embedding.out", *(f"blk.{layer}.layer.out" for layer in range(layers - 1)), "head.normed"]
    run("compile", gguf, "--target", "cpu", "--ctx", 512, "-o", tmp_path / "plan.bin")
    taps = [word for name in names for word in ("--tap", name)]
    out = tmp_path / "taps.safetensors"
    run("logits", tmp_path / "plan.bin", "--all", "--tokens", ",".join(map(str, tokens)), *taps, "-o", out)
    data = out.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for name, table in zip(names, states):
        first, end = header[name]["data_offsets"]
        tapped = numpy.frombuffer(data[start + first : start + end], "<f4").reshape(table.shape)
        assert (tapped == table).all(), name
    # The next prompt is read from its beginning.
    assert (model.hidden_states("She was not at all") == states).all()


def test_tokens_round_trip(model):
    for text in ["She was", "", "  two spaces\n\ttabs", "naïve “quotes” — 東京 🦀", "<turn|>"]:
        tokens = model.tokenize(text)
        assert all(type(token) is int for token in tokens)
        assert model.detokenize(tokens) == text


def test_errors_are_one_class_and_name_what_they_are_about(model, gguf, tmp_path):
    plan = tmp_path / "plan.bin"
    run("compile", gguf, "--target", "cpu", "--ctx", 64, "-o", plan)
    (tmp_path / "text").write_text("no model")
    long = "once more " * 400
    for act, said in [
        (lambda: gemma4c.Model(tmp_path / "nothing"), "cannot read .*nothing: No such file"),
        (lambda: gemma4c.Model(tmp_path / "text"), "text"),
        (lambda: gemma4c.Model(gguf, device="abacus"), 'device "abacus": there are auto, cuda, cpu and sim'),
        (lambda: gemma4c.Model(gguf, kv="f8"), 'kv "f8": there are f16, bf16, f32, q8_0, fp8'),
        (lambda: gemma4c.Model(gguf, device="cpu", context=1 << 20), "a context of 1048576 is out of range"),
        (lambda: gemma4c.Model(gguf, device="cpu", sequences=0), "sequences 0: at least one is needed"),
        (lambda: gemma4c.Model(gguf, device="cpu", memory=2.0), "memory 2: a part is more than 0 and at most 1"),
        (lambda: gemma4c.Model(plan, device="cpu", context=32), "context is for a GGUF model; .* is a plan"),
        (lambda: gemma4c.Model(gguf, device="cpu", drafter=gguf), "austen.gguf"),
        (lambda: model.generate(long), "the context has room for 512"),
        (lambda: model.generate(["She", long]), "the context has room for 512"),
        (lambda: model.generate("She", temperature=3.0), "a temperature of 3"),
        (lambda: model.generate("She", max_tokens=-2), "max_tokens -2 is no count, nor -1 for all"),
        (lambda: model.generate("She", seed=1 << 64), "seed 18446744073709551616 is no whole number of 64 bits"),
        (lambda: model.generate("She", stop=""), "stop: an empty text"),
        (lambda: model.generate([2, -5]), r"prompt\[1\]: -5 is no token id"),
        (lambda: model.generate(["She", [2, "x"]]), r"prompt\[1\]\[1\]: 'x' is no token id"),
        (lambda: model.generate(7), "prompt is neither a text nor a list"),
        (lambda: model.generate([1 << 30]), "1073741824"),
        (lambda: model.detokenize([1 << 30]), "1073741824"),
        (lambda: model.chat("hello"), "messages must be a list of messages"),
        (lambda: model.chat([{"role": "judge", "content": "x"}]), r"messages\[0\].role is \"judge\""),
        (lambda: model.chat([{"role": "user", "content": b"x"}]), "messages is no JSON: TypeError"),
        (lambda: model.perplexity("She was", window=512), "too few for a window of 512"),
        (lambda: model.perplexity("She was", window=2), "window 2: at least 3 tokens are needed"),
    ]:
        with pytest.raises(gemma4c.Error, match=said):
            act()
    with pytest.raises(TypeError, match="must be real number, not str"):
        model.generate("She", temperature="warm")
    # Nothing of this stays behind.
    assert len(model.generate("He", max_tokens=3, temperature=0).tokens) == 3


def test_a_closed_model_says_so(gguf):
    with gemma4c.Model(gguf, device="cpu", context=128, sequences=2, quiet=True) as model:
        assert repr(model) == "Model(on cpu, context 128, 2 sequences)"
        assert (model.device, model.context, model.sequences) == ("cpu", 128, 2)
        running = model.stream("She was", max_tokens=100)
        assert next(running)
    with pytest.raises(gemma4c.Error, match="the model is closed"):
        model.generate("She")
    # What had come before is still there; the rest does not come.
    with pytest.raises(gemma4c.Error, match="closed|interrupted"):
        list(running)


def test_other_threads_run_while_the_model_computes(model):
    counted, ends = 0, False

    def count():
        nonlocal counted
        while not ends:
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    started = time.monotonic()
    model.generate(PROMPTS * 4, max_tokens=40, temperature=0)
    seconds, while_computed = time.monotonic() - started, counted
    ends = True
    thread.join()
    assert seconds > 0.05 and while_computed > 50 * seconds, (seconds, while_computed)


def test_threads_may_share_a_model(model):
    expected = [model.generate(prompt, **SETTINGS) for prompt in PROMPTS]
    found = [None] * len(PROMPTS)

    def answer(index):
        found[index] = model.generate(PROMPTS[index], **SETTINGS)

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


INTERRUPTED = """
import signal, sys, time
import gemma4c
# Whoever started this may have had it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = gemma4c.Model(sys.argv[1], device="cpu", context=512, quiet=True)
expected = model.generate("She", max_tokens=5, temperature=0)
def long(): model.generate(["She was", "It is"] * 5000, max_tokens=400)
def streamed():
    while True:
        for piece in model.stream("She was", max_tokens=400): pass
def read():
    while True: model.hidden_states("She was not " * 60)
for call in long, streamed, read:
    print("running", flush=True)
    try:
        call()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert model.generate("She", max_tokens=5, temperature=0) == expected
    print("as before", flush=True)
"""


def test_ctrl_c_is_an_exception_within_a_second(gguf):
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, gguf], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        assert child.stdout.readline() == "running\n"
        time.sleep(0.5)
        started = time.monotonic()
        child.send_signal(2)
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started < 1.0
        assert child.stdout.readline() == "as before\n"
    assert child.wait() == 0


def test_text_needs_no_numpy(gguf):
    code = (
        "import sys; sys.modules['numpy'] = None; import gemma4c; m = gemma4c.Model(sys.argv[1], device='cpu', quiet=True);"
        "print(len(m.generate(['She was', 'No'], max_tokens=3, temperature=0)))"
    )
    assert subprocess.run([sys.executable, "-c", code, gguf], capture_output=True, text=True).stdout == "2\n"
