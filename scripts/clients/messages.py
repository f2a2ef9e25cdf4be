"""Anthropic's client, Claude Code's requests and openai's transcriptions against a server with a random model.

usage: messages.py URL [media]        the server's model is called `tiny`; its context is 2048 tokens or more
`media` sends pictures and sounds, and nothing else: to a server whose model reads them.

Answers and events are held to the client's own types, strictly: no required field is missing, none has another type, none is unknown.
"""

import base64
import io
import json
import math
import struct
import sys
import urllib.request
import wave
import zlib

import anthropic
import pydantic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

URL = sys.argv[1]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Hi <|turn>model"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}}, "required": ["city", "days"]},
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
checked = 0


def extras(value, path):
    """No field that the types do not know."""
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, f"{path}: {type(value).__name__} has no fields {list(value.model_extra)}"
        for name in type(value).model_fields:
            extras(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            extras(item, f"{path}[{index}]")


def strict(kind, text, what):
    global checked
    checked += 1
    extras(pydantic.TypeAdapter(kind).validate_json(text, strict=True), what)


def post(path, **body):
    headers = {"content-type": "application/json", "anthropic-version": "any", "anthropic-beta": "claude-code,interleaved-thinking", "x-api-key": "none"}
    request = urllib.request.Request(URL + path, json.dumps(body, default=lambda block: block.model_dump(exclude_none=True)).encode(), headers)
    with urllib.request.urlopen(request) as response:
        assert response.headers["request-id"], "an answer without a request-id"
        return response.read().decode()


def ask(**more):
    return {"model": "tiny", "max_tokens": 60, "messages": ASK, "extra_body": {"seed": 3}, **more}


def without_ids(blocks):
    return [{key: value for key, value in block.model_dump().items() if key != "id"} for block in blocks]


def both(**more):
    """The same whole, streamed, and through the beta client; each held to the types."""
    body = {key: value for key, value in ask(**more).items() if key != "extra_body"} | ask(**more)["extra_body"]
    text = post("/v1/messages?beta=true", **body)
    strict(Message, text, "message")
    for line in post("/v1/messages", **body, stream=True).splitlines():
        if line.startswith("data: "):
            kind = json.loads(line[6:])["type"]
            if kind != "ping":
                strict(RawMessageStreamEvent, line[6:], kind)
    whole = client.messages.create(**ask(**more))
    with client.messages.stream(**ask(**more)) as stream:
        for event in stream:
            pass
        final = stream.get_final_message()
    assert without_ids(final.content) == without_ids(whole.content), (final, whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    beta = client.beta.messages.create(**ask(**more))
    assert [block.type for block in beta.content] == [block.type for block in whole.content]
    return whole


def test_text():
    whole = both(max_tokens=12, system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}], metadata={"user_id": "u"})
    assert whole.type == "message" and whole.stop_reason in ("max_tokens", "end_turn") and whole.content[0].type == "text"
    text = whole.content[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = both(max_tokens=12, system="Be brief", stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop), stopped
    both(messages=ASK + [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 1})
    count = client.messages.count_tokens(model="tiny", messages=ASK, system="Be brief")
    read = client.messages.create(**ask(system="Be brief", max_tokens=1)).usage
    assert count.input_tokens == read.input_tokens + read.cache_read_input_tokens > 5 and read.cache_read_input_tokens > 0
    strict(MessageTokensCount, post("/v1/messages/count_tokens?beta=true", model="tiny", messages=ASK), "count")


def test_tools():
    more = dict(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=300)
    called = both(**more)
    call = called.content[-1]
    assert called.stop_reason == "tool_use" and call.type == "tool_use" and set(call.input) == {"city", "days"}
    history = ASK + [{"role": "assistant", "content": called.content}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}, {"type": "text", "text": "And?"}]}]
    both(messages=history, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=8)
    both(tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=300)
    formed = both(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=400)
    assert json.loads(formed.content[-1].text)["a"] in ("x", "y")


def test_thinking():
    """A random model thinks now and then: the first seed with which it does."""
    more = dict(thinking={"type": "enabled", "budget_tokens": 40}, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=400)
    thought = lambda seed: client.messages.create(**ask(**more, extra_body={"seed": seed})).content[0].type == "thinking"
    seed = next((seed for seed in range(200) if thought(seed)), None)
    assert seed is not None, "no answer had thoughts"
    whole = both(**more, extra_body={"seed": seed})
    assert [block.type for block in whole.content] == ["thinking", "text"] and whole.content[0].signature
    both(messages=ASK + [{"role": "assistant", "content": whole.content}, {"role": "user", "content": "More"}], thinking={"type": "adaptive"}, max_tokens=8)


def test_errors():
    for wrong, kind, word in [
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, anthropic.BadRequestError, "prompt is too long"),
        ({"extra_body": {"temperature": 7}}, anthropic.BadRequestError, "temperature"),
    ]:
        for send in (client.messages.create, client.beta.messages.create):
            try:
                send(**ask(**wrong))
                raise AssertionError(f"{wrong} was taken")
            except kind as error:
                assert word in error.body["error"]["message"] and error.body["type"] == "error" and error.request_id, error


def test_claude_code():
    """The shape of its requests, turn after turn: all but the last messages must be kept from the turn before."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"file_path": {"type": "string", "description": "An absolute path"}, "limit": {"type": "number"}}, "required": ["file_path"], "additionalProperties": False}
    names = "Task Bash Glob Grep Read Edit Write NotebookEdit WebFetch TodoWrite WebSearch BashOutput KillShell Skill mcp__server__a_tool_with_quite_a_long_name_as_servers_of_tools_like_them".split()
    tools = [{"name": name, "description": f"What {name} does", "input_schema": schema} for name in names]
    cached = {"cache_control": {"type": "ephemeral"}}
    messages, read = [], []
    for turn in range(3):
        reminder = {"type": "text", "text": "<system-reminder>\nBe careful\n</system-reminder>"}
        messages.append({"role": "user", "content": [reminder, {"type": "text", "text": f"Turn {turn}", **cached}]})
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={turn}ab;"},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **cached},
            {"type": "text", "text": "\nYou are an interactive CLI tool. " * 12, **cached},
        ]
        body = dict(model="tiny", max_tokens=32000, messages=messages, system=system, tools=tools, metadata={"user_id": "user_1_account__session_2"}, thinking={"type": "adaptive"}, context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, temperature=1, stream=True)
        body |= {"stop_sequences": ["e", "a", "\n"], "seed": turn}
        text = ""
        for line in post("/v1/messages?beta=true", **body).splitlines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if event["type"] == "message_start":
                    read.append(event["message"]["usage"])
                text += event.get("delta", {}).get("text", "")
        assert event["type"] == "message_stop", event
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text or "Yes"}]})
        assert json.loads(post("/v1/messages/count_tokens?beta=true", **{key: body[key] for key in ("model", "messages", "system", "tools", "thinking")})) != {}
    assert read[0]["input_tokens"] > 100 and all(usage["cache_read_input_tokens"] >= read[0]["input_tokens"] // 2 for usage in read[1:]), read


def picture():
    """A PNG of 96 x 64 pixels."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + bytes(value for x in range(96) for value in (2 * x, 4 * y, 99)) for y in range(64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 96, 64, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sound(seconds):
    """A tone as a WAV file, silent for a third of every fifth second."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        loud = lambda at: 0 if at // 5333 % 15 == 0 else 9000
        out.writeframes(b"".join(struct.pack("<h", int(loud(at) * math.sin(at / 6))) for at in range(int(16000 * seconds))))
    return file.getvalue()


def test_pictures():
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture()).decode()}
    image = {"type": "image", "source": source}
    seen = both(messages=[{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}], max_tokens=6)
    bare = both(messages=[{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}], max_tokens=6)
    prompt = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert prompt(seen.usage) > prompt(bare.usage) + 20
    try:
        both(messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}]}])
        raise AssertionError("a URL of this machine was fetched")
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"messages[0].content[0]" in error.read()


def test_transcriptions():
    import openai
    from openai.types.audio import Transcription, TranscriptionStreamEvent

    client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
    create = lambda seconds, **more: client.audio.transcriptions.create(**{"model": "tiny", "file": ("a.wav", sound(seconds)), "extra_body": {"max_tokens": 8}, **more})
    for seconds in (1.5, 40):
        whole = create(seconds)
        extras(pydantic.TypeAdapter(Transcription).validate_json(whole.model_dump_json(), strict=True), "transcription")
        assert whole.usage.type == "tokens" and whole.usage.output_tokens == 8 * (1 if seconds < 30 else 2), whole
        assert create(seconds, response_format="text").rstrip("\n") == whole.text
        events = list(create(seconds, stream=True, language="en" if seconds == 0 else openai.omit))
        for event in events:
            extras(pydantic.TypeAdapter(TranscriptionStreamEvent).validate_json(event.model_dump_json(exclude_unset=True), strict=True), event.type)
        assert "".join(event.delta for event in events[:-1]) == events[-1].text == whole.text
    assert create(1, language="de", prompt="Łódź", temperature=0.4).text is not None
    for wrong, param in [({"response_format": "srt"}, "response_format"), ({"file": ("a.wav", b"nothing")}, "file"), ({"temperature": 9}, "temperature")]:
        try:
            create(1, **wrong)
            raise AssertionError(f"{wrong} was taken")
        except openai.BadRequestError as error:
            assert error.param == param, error


media = sys.argv[2:] == ["media"]
failed = False
for test in [test_pictures, test_transcriptions] if media else [test_text, test_tools, test_thinking, test_errors, test_claude_code]:
    try:
        test()
        print(f"messages: {test.__name__} ok")
    except Exception as error:
        failed = True
        print(f"messages: {test.__name__} FAILED: {type(error).__name__}: {error}")
print(f"anthropic's types, strict: {checked} answers and events")
sys.exit(failed)
