"""Puts a server through what clients do to it, good and bad, and checks that nothing is lost.

usage: soak.py URL PID REQUESTS

Requests come from many threads. Most are right, and each answer must be what the same request got alone. Some are garbage and must be refused with a
proper error; some clients go away in the middle. At the end nothing runs or waits, and the server's memory is what it was after the first tenth.
"""

import http.client
import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlparse

URL, PID, COUNT = urlparse(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
KINDS = 60
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}}
GARBAGE = [b"", b"{", b"\xff\xfe\x00", b"[1,2", b'{"messages":1}', b'{"messages":[]}', b'{"messages":[{"role":"user","content":"x"}],"n":1e99}',
           b'{"messages":[{"role":"user","content":"x"}],"temperature":"hot"}', b'{"messages":[{"role":7}]}', b"[" * 5000]


def request(kind):
    chance = random.Random(kind)
    body = {"messages": [{"role": "user", "content": "word " * chance.randint(1, 60)}], "seed": kind, "max_tokens": chance.randint(1, 20)}
    if kind % 5 == 0:
        body["response_format"] = FORM
    if kind % 7 == 0:
        body["n"] = 2
    return body


def post(data, timeout=120):
    connection = http.client.HTTPConnection(URL.hostname, URL.port, timeout=timeout)
    try:
        connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def ask(kind, stream):
    status, text = post(json.dumps({**request(kind), "stream": stream}))
    assert status == 200, (kind, status, text[:300])
    choices = {}
    if stream:
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
        for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")):
            for choice in event["choices"]:
                choices[choice["index"]] = choices.get(choice["index"], "") + (choice["delta"].get("content") or "")
    else:
        choices = {choice["index"]: choice["message"]["content"] for choice in json.loads(text)["choices"]}
    return choices


def cut(kind):
    """Goes away at some point: in the head, in the body, before the answer or in the middle of it."""
    data = json.dumps({**request(kind), "stream": True, "max_tokens": 400}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection((URL.hostname, URL.port), timeout=60) as connection:
        whole = head + data
        sent = random.choice([len(whole), len(whole), random.randint(1, len(whole))])
        connection.sendall(whole[:sent])
        if sent == len(whole) and random.random() < 0.7:
            connection.recv(random.choice([1, 300, 2000]))


def memory():
    with open(f"/proc/{PID}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) // 1024


def metric(name):
    connection = http.client.HTTPConnection(URL.hostname, URL.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(next(line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")).rsplit(" ", 1)[1])


alone = [ask(kind, False) for kind in range(KINDS)]
counts, lock = {"right": 0, "refused": 0, "cut": 0}, threading.Lock()


def one(number):
    chance = random.Random(number)
    what = chance.random()
    if what < 0.05:
        status, text = post(GARBAGE[number % len(GARBAGE)])
        assert status == 400 and json.loads(text)["error"]["code"], (status, text[:300])
        kind = "refused"
    elif what < 0.15:
        try:
            cut(number % KINDS)
        except ConnectionError:
            pass
        kind = "cut"
    else:
        found = ask(number % KINDS, chance.random() < 0.5)
        assert found == alone[number % KINDS], (number, found, alone[number % KINDS])
        kind = "right"
    with lock:
        counts[kind] += 1


def batch(numbers):
    with ThreadPoolExecutor(32) as pool:
        for done in pool.map(one, numbers):
            pass


started = time.time()
batch(range(COUNT // 10))
before = memory()
batch(range(COUNT // 10, COUNT))
for _ in range(200):
    if metric("num_requests_running") + metric("num_requests_waiting") == 0:
        break
    time.sleep(0.05)
else:
    sys.exit("something still runs or waits")
after = memory()
print(f"{counts} in {time.time() - started:.0f} s; memory {before} MiB after a tenth, {after} MiB at the end")
assert after < before * 1.2 + 32, "memory has grown"
