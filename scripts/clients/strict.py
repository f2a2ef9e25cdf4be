"""Holds every answer of a server to the official client's own types, strictly: no required field is missing, none has another type, none is unknown.

usage: strict.py URL [failing]        the server's model is called `tiny`; `failing` is for a server that ends every request with an error (--deadline 0)

The client itself reads answers without checking them, so that a missing field is found by whoever uses it first. The differences that are meant are listed below.
"""

import json
import sys
import typing
import urllib.request

import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model
from openai.types.responses import Response, ResponseStreamEvent

URL = sys.argv[1]
# Fields that other servers have too and clients look for; `store` and a call's name are in OpenAI's own answers.
EXTENSIONS = {
    ("Model", "max_model_len"), ("Model", "input_modalities"),
    ("ChatCompletionMessage", "reasoning_content"), ("ChatCompletionMessage", "reasoning"),
    ("ChoiceDelta", "reasoning_content"), ("ChoiceDelta", "reasoning"),
    ("Response", "store"), ("ResponseFunctionCallArgumentsDoneEvent", "name"),
}
# Null where the client's types have none, and OpenAI's own server sends it: a completion that goes on, and a prompt's first token, which has no probability.
NULLS = {"finish_reason", "token_logprobs", "top_logprobs"}
TOOL = {"name": "get_weather", "description": "The weather", "strict": True, "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"], "additionalProperties": False}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
ASK = [{"role": "user", "content": "Hi"}]
problems, checked, seen = [], 0, set()


def extras(value, path):
    """Fields that the types do not know."""
    if isinstance(value, pydantic.BaseModel):
        owner = type(value).__name__
        for name in value.model_extra or {}:
            if (owner, name) not in EXTENSIONS:
                problems.append(f"{path}: {owner} has no field {name}")
        for name in type(value).model_fields:
            extras(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for name, item in value.items():
            extras(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            extras(item, f"{path}[{index}]")


def check(kind, text, what):
    global checked
    checked += 1
    try:
        extras(pydantic.TypeAdapter(kind).validate_json(text, strict=True), what)
    except pydantic.ValidationError as error:
        for found in error.errors():
            is_meant = kind is Completion and found["input"] is None and NULLS & set(found["loc"])
            if not is_meant:
                problems.append(f"{what}: {'.'.join(map(str, found['loc']))}: {found['msg']}, found {json.dumps(found['input'])[:80]}")


def post(path, **body):
    data = json.dumps({"model": "tiny", "seed": 1, **body}).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


def events(text):
    return [line[6:] for line in text.splitlines() if line.startswith("data: {")]


def completion(path, whole, chunk, what, **body):
    check(whole, post(path, **body), what)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for data in events(post(path, **body, **options)):
        check(chunk, data, what + ", streamed")


def by_type():
    union = typing.get_args(ResponseStreamEvent)[0]
    kind = lambda event: typing.get_args(event.model_fields["type"].annotation)[0]
    return {kind(event): event for event in typing.get_args(union)}


def response(what, **body):
    """The same whole and streamed; gives back the whole."""
    whole = post("/v1/responses", **body)
    check(Response, whole, what)
    stream(what, **body)
    return json.loads(whole)


def stream(what, **body):
    kinds = by_type()
    for data in events(post("/v1/responses", **body, stream=True)):
        kind = json.loads(data)["type"]
        seen.add(kind)
        if kind in kinds:
            check(kinds[kind], data, f"{what}, {kind}")
        else:
            problems.append(f"{what}: the client knows no event {kind}")


def thoughts(ask):
    """A random model thinks now and then: the first seed with which it does."""
    return next((seed for seed in range(200) if ask(seed)), None)


def failing():
    stream("a response that fails", input="Hi", max_output_tokens=200)
    assert "response.failed" in seen, seen


def succeeding():
    chat = lambda what, **body: completion("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, what, messages=ASK, max_tokens=200, **body)
    chat("chat", n=2, stop=["~~"])
    chat("chat with log probabilities", logprobs=True, top_logprobs=3)
    chat("chat with a call", tools=[{"type": "function", "function": TOOL}], tool_choice="required", parallel_tool_calls=False)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    thinking = dict(response_format=form, reasoning_effort="high", max_tokens=400)
    ask = lambda seed: "reasoning_content" in json.loads(post("/v1/chat/completions", messages=ASK, **{**thinking, "seed": seed}))["choices"][0]["message"]
    seed = thoughts(ask)
    assert seed is not None, "no answer had thoughts"
    completion("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, "chat with thoughts", messages=ASK, **{**thinking, "seed": seed})

    text = lambda what, **body: completion("/v1/completions", Completion, Completion, what, prompt="Once upon", max_tokens=12, **body)
    text("completion")
    text("completion with log probabilities", logprobs=2)
    text("completion with its prompt", echo=True)
    text("completion with its prompt and log probabilities", echo=True, logprobs=2)

    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = response("response", input="Hi", instructions="Be brief", temperature=0.7, top_p=0.95, text=form)
    if (answer["temperature"], answer["top_p"]) != (0.7, 0.95):
        problems.append(f"response: temperature 0.7 and top_p 0.95 became {answer['temperature']} and {answer['top_p']}")
    response("response that is cut", input=[{"role": "user", "content": "Hi"}], max_output_tokens=2, metadata={"a": "b"}, reasoning={"effort": "low"})
    call = response("response with a call", input="Hi", max_output_tokens=300, tools=[{"type": "function", **TOOL}], tool_choice="required", parallel_tool_calls=False)
    if call["usage"]["input_tokens"] < sum(call["usage"]["input_tokens_details"].values()):
        problems.append(f"response with a call: {call['usage']}")
    thinking = dict(input="Hi", max_output_tokens=400, reasoning={"effort": "high"}, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}})
    ask = lambda seed: json.loads(post("/v1/responses", **{**thinking, "seed": seed}))["output"][0]["type"] == "reasoning"
    seed = thoughts(ask)
    assert seed is not None, "no response had thoughts"
    response("response with thoughts", **{**thinking, "seed": seed})
    with urllib.request.urlopen(URL + "/v1/models") as models:
        check(Model, json.dumps(json.load(models)["data"][0]), "model")

    kinds = "created in_progress completed incomplete output_item.added output_item.done content_part.added content_part.done output_text.delta output_text.done"
    kinds += " function_call_arguments.delta function_call_arguments.done reasoning_text.delta reasoning_text.done"
    missing = {"response." + kind for kind in kinds.split()} - seen
    assert not missing, f"events that never came: {missing}"


failing() if sys.argv[2:] == ["failing"] else succeeding()
for problem in dict.fromkeys(problems):
    print(problem)
print(f"openai's types, strict: {checked} answers and events, {len(seen)} kinds of events, {len(problems)} problems")
sys.exit(bool(problems))
