"""ollama's own client in Python against a server with a random model: what it parses must be what was asked for.

usage: ollama_client.py URL        the server's model is called `tiny`
"""

import asyncio
import json
import sys

import ollama

HOST = sys.argv[1]
CLIENT = ollama.Client(host=HOST)
ASK = [{"role": "user", "content": "Hi <|turn>model"}]
SHORT = {"num_predict": 12, "seed": 1}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "required": ["ok", "n"], "additionalProperties": False}


def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: Its name
        days: How many
    """
    return f"{city}: 21 degrees for {days} days"


def test_lists():
    [model] = CLIENT.list().models
    assert model.model == "tiny:latest" and model.size > 0 and model.details.format == "gguf", model
    assert model.details.quantization_level == "Q8_0" and model.modified_at.year > 2000, model
    shown = CLIENT.show("tiny")
    assert shown.modelinfo["general.architecture"] == "gemma4" and "completion" in shown.capabilities, shown
    assert shown.modelinfo["general.parameter_count"] > 0 and shown.template
    [running] = CLIENT.ps().models
    assert running.name == "tiny:latest" and running.expires_at.year == 9999, running


def test_pull():
    assert CLIENT.pull("tiny").status == "success"
    assert [line.status for line in CLIENT.pull("tiny:latest", stream=True)] == ["success"]
    refused("pull", 404, "gemma4c serve llama3.2", model="llama3.2")


def test_chat():
    whole = CLIENT.chat("tiny", ASK, options=SHORT)
    parts = list(CLIENT.chat("tiny", ASK, options=SHORT, stream=True))
    assert whole.done and whole.message.role == "assistant" and whole.eval_count > 0
    assert "".join(part.message.content for part in parts) == whole.message.content
    last = parts[-1]
    assert last.done and last.done_reason in ("stop", "length") and not any(part.done for part in parts[:-1])
    assert 0 < last.prompt_eval_duration + last.eval_duration <= last.total_duration, last
    assert CLIENT.chat("tiny", []).done_reason == "load"
    assert CLIENT.chat("tiny", [], keep_alive=0).done_reason == "unload"


def test_generate():
    whole = CLIENT.generate("tiny", "Hi", system="Be brief", options=SHORT)
    parts = CLIENT.generate("tiny", "Hi", system="Be brief", options=SHORT, stream=True)
    assert "".join(part.response for part in parts) == whole.response and whole.done
    raw = CLIENT.generate("tiny", "Once upon", raw=True, options=SHORT)
    assert raw.done_reason in ("stop", "length")
    assert CLIENT.generate("tiny").done_reason == "load"


def test_format():
    answer = CLIENT.chat("tiny", ASK, format=SCHEMA, options={"num_predict": 200, "seed": 1})
    value = json.loads(answer.message.content)
    assert value["n"] in (1, 2) and isinstance(value["ok"], bool), value
    assert CLIENT.generate("tiny", "Hi", format="json", options=SHORT).response.startswith("{")


def test_think():
    for think in (True, False, "high"):
        answer = CLIENT.chat("tiny", ASK, think=think, options=SHORT)
        assert answer.message.thinking is None or think, answer
    refused("chat", 400, "think must be", model="tiny", messages=ASK, think="very")


def test_tools():
    options = {"num_predict": 300, "temperature": 2.0, "top_k": 0, "top_p": 1.0}
    for seed in range(100):
        message = CLIENT.chat("tiny", ASK, tools=[get_weather], options={**options, "seed": seed}).message
        if message.tool_calls:
            break
    else:
        raise AssertionError("the model has called no tool")
    call = message.tool_calls[0].function
    assert call.name == "get_weather" and set(call.arguments) >= {"city", "days"}, call
    result = {"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)}
    answer = CLIENT.chat("tiny", [*ASK, message, result], tools=[get_weather], options=SHORT)
    assert answer.done


def test_async():
    async def stream():
        parts = [part async for part in await ollama.AsyncClient(host=HOST).chat("tiny", ASK, options=SHORT, stream=True)]
        return "".join(part.message.content for part in parts)

    assert asyncio.run(stream()) == CLIENT.chat("tiny", ASK, options=SHORT).message.content


def refused(name, status, word, **request):
    try:
        getattr(CLIENT, name)(**request)
    except ollama.ResponseError as error:
        assert error.status_code == status and word in error.error, (error.status_code, error.error)
    else:
        raise AssertionError(f"{name} of {request} is not refused")


def test_refusals():
    refused("chat", 404, "llama3.2", model="llama3.2", messages=ASK)
    refused("chat", 400, "options.temperature must be", model="tiny", messages=ASK, options={"temperature": 9})
    refused("embed", 400, "embeddings are not served", model="tiny", input="Hi")
    refused("delete", 400, "gemma4c serve", model="tiny")
    refused("copy", 400, "gemma4c serve", source="tiny", destination="other")
    refused("generate", 400, "suffix is not supported", model="tiny", prompt="a", suffix="b")


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(f"ollama {name.removeprefix('test_')}: ok")
