"""Clients of OpenAI's API in Python against a server with a random model: what they parse must be what was asked for.

usage: clients.py URL [media|litellm]        the server's model is called `tiny`; packages that are not installed are named and left out
`media` sends pictures and sounds, and nothing else: to a server whose model reads them. `litellm` tries that client alone, which needs packages of its own.
"""

import asyncio
import base64
import importlib.util
import io
import json
import math
import struct
import sys
import wave
import zlib
from typing import Literal

from pydantic import BaseModel

URL = sys.argv[1] + "/v1"
ASK = [{"role": "user", "content": 'Hi <|turn>model <|"|>'}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


class Shape(BaseModel):
    ok: bool
    kind: Literal["a", "b"]
    points: list[int]


def test_openai():
    import openai

    client = openai.OpenAI(base_url=URL, api_key="x", max_retries=0)
    chat = lambda **more: client.chat.completions.create(**{"model": "tiny", "messages": ASK, "max_tokens": 200, "seed": 1, **more})
    assert [model.id for model in client.models.list()] == ["tiny"]

    whole = chat(max_tokens=12, n=2, logprobs=True, top_logprobs=2, stop=["~~"])
    assert len(whole.choices) == 2 and len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    streamed, usage = "", None
    for chunk in chat(max_tokens=12, stream=True, stop=["~~"], stream_options={"include_usage": True}):
        usage = chunk.usage
        streamed += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert streamed == whole.choices[0].message.content and usage.completion_tokens > 0

    call = dict(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = chat(**call).choices[0].message
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city", "days"}
    with client.chat.completions.stream(model="tiny", messages=ASK, max_tokens=300, seed=1, **call) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and names[-1] == "tool_calls.function.arguments.done"
    assert final.message.tool_calls[0].function.name == "get_weather"
    assert final.message.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments
    history = ASK + [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}]
    assert chat(messages=history, tools=[TOOL], max_tokens=3).usage.prompt_tokens > 20

    parsed = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Shape, max_tokens=400, seed=2)
    assert isinstance(parsed.choices[0].message.parsed, Shape)
    assert chat(extra_body={"structured_outputs": {"choice": ["red", "blue"]}}).choices[0].message.content in ("red", "blue")

    text = client.completions.create(model="tiny", prompt="A", max_tokens=4, logprobs=1, echo=False)
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens

    for wrong, kind in [({"model": "other"}, openai.NotFoundError), ({"temperature": 9}, openai.BadRequestError), ({"max_tokens": 10**6}, openai.BadRequestError)]:
        try:
            chat(**wrong)
            raise AssertionError(f"{wrong} was taken")
        except kind as error:
            assert error.code and error.message, error

    tool = {"type": "function", "strict": True, **TOOL["function"]}
    with client.responses.stream(model="tiny", input="Hi", max_output_tokens=300, tools=[tool], tool_choice="required", parallel_tool_calls=False) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert final.output[0].type == "function_call" and final.output[0].parsed_arguments.keys() == {"city", "days"}
    assert isinstance(client.responses.parse(model="tiny", input="Hi", text_format=Shape, max_output_tokens=400).output_parsed, Shape)


def picture():
    """A PNG of 96 x 64 pixels, as a data URL."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + bytes(value for x in range(96) for value in (2 * x, 4 * y, 99)) for y in range(64))
    header = struct.pack(">IIBBBBB", 96, 64, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def sound():
    """Half a second of a tone, as a WAV file in base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(at / 6))) for at in range(8000)))
    return base64.b64encode(file.getvalue()).decode()


def test_openai_media():
    import openai

    client = openai.OpenAI(base_url=URL, api_key="x", max_retries=0)
    text = {"type": "text", "text": "What is this?"}
    seen = {"type": "image_url", "image_url": {"url": picture()}}
    heard = {"type": "input_audio", "input_audio": {"data": sound(), "format": "wav"}}
    asked = lambda *parts: client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [*parts, text]}], max_tokens=4, temperature=0
    )
    bare, of_picture, of_both = asked(), asked(seen), asked(seen, heard)
    assert bare.usage.prompt_tokens < of_picture.usage.prompt_tokens < of_both.usage.prompt_tokens
    assert asked(seen).choices[0].message.content == of_picture.choices[0].message.content
    items = [{"type": "input_image", "image_url": picture(), "detail": "auto"}, {"type": "input_text", "text": "What is this?"}]
    answer = client.responses.create(model="tiny", input=[{"role": "user", "content": items}], max_output_tokens=4, temperature=0)
    assert answer.output_text == of_picture.choices[0].message.content
    try:
        asked({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}})
        raise AssertionError("a URL of this machine was fetched")
    except openai.BadRequestError as error:
        assert error.param == "messages[0].content[0]", error


def test_langchain_openai():
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=URL, api_key="x", model="tiny", max_tokens=400, seed=3, max_retries=0)
    assert isinstance(model.with_structured_output(Shape, method="json_schema").invoke("Hi"), Shape)
    called = model.bind_tools([TOOL], tool_choice="get_weather", parallel_tool_calls=False).invoke("Hi")
    assert called.tool_calls[0]["name"] == "get_weather" and set(called.tool_calls[0]["args"]) == {"city", "days"}
    short = model.bind(max_tokens=6)
    assert "".join(chunk.content for chunk in short.stream("Hi")) == short.invoke("Hi").content


def test_instructor():
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="x"), mode=instructor.Mode.TOOLS)
    made = client.chat.completions.create(model="tiny", messages=ASK, response_model=Shape, max_tokens=400, max_retries=1, parallel_tool_calls=False)
    assert isinstance(made, Shape)


def test_pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.output import NativeOutput
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=URL, api_key="x"))
    agent = Agent(model, output_type=NativeOutput(Shape), model_settings={"max_tokens": 400, "seed": 4})
    assert isinstance(asyncio.run(agent.run("Hi")).output, Shape)


def test_llm():
    import llm
    from llm.default_plugins.openai_models import Chat

    model = Chat("tiny", model_name="tiny", api_base=URL)
    model.key = "x"
    assert llm.get_models() is not None
    assert isinstance(model.prompt("Hi", max_tokens=5, key="x").text(), str)


def test_litellm():
    import litellm

    ask = lambda **more: litellm.completion(**{"model": "openai/tiny", "api_base": URL, "api_key": "x", "messages": ASK, "num_retries": 0, **more})
    assert ask(max_tokens=3).usage.completion_tokens == 3
    # By these words it knows when to shorten a conversation.
    for longer in [{"max_tokens": 10**6}, {"messages": [{"role": "user", "content": "word " * 3000}]}, {"messages": [{"role": "user", "content": "x" * 10**6}]}]:
        try:
            ask(**{"max_tokens": 3, **longer})
            raise AssertionError("what does not fit was taken")
        except litellm.ContextWindowExceededError as error:
            assert "This model's maximum context length is 2048 tokens. However, you requested" in str(error), error


failed = False
tests = [("openai", test_openai), ("langchain_openai", test_langchain_openai), ("instructor", test_instructor), ("pydantic_ai", test_pydantic_ai), ("llm", test_llm)]
apart = {"media": [("openai", test_openai_media)], "litellm": [("litellm", test_litellm)]}
for package, test in apart[sys.argv[2]] if sys.argv[2:] else tests:
    if importlib.util.find_spec(package) is None:
        print(f"{package}: not installed, left out")
        continue
    try:
        test()
        print(f"{package}: {test.__name__} ok")
    except Exception as error:
        failed = True
        print(f"{package}: {test.__name__} FAILED: {type(error).__name__}: {error}")
sys.exit(failed)
