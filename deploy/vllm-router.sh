#!/usr/bin/env bash
# Two replicas of `gemma4c serve` behind vllm-router, which sends prompts that begin alike to the same replica. Proves itself with a tiny random
# model on the CPU: answers through the router are those of a replica, streamed or whole, and repeated prompts are found in its cache.
# Needs Python 3 with venv; the router is installed into .cache/router the first time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${GEMMA4C_TOOLS:-$PWD/.cache}/router
gemma4c=${GEMMA4C:-target/debug/gemma4c}
[[ -x $gemma4c ]] || cargo build
if [[ ! -x $folder/bin/vllm-router ]]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet vllm-router
fi

work=$(mktemp -d)
running=()
trap 'kill "${running[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
"$gemma4c" synth tiny-e -q q8_0 -o "$work/model.gguf"
"$gemma4c" compile "$work/model.gguf" -o "$work/plan.bin" --target cpu --ctx 2048
urls=()
for replica in 1 2; do
    "$gemma4c" serve "$work/plan.bin" --port 0 --alias tiny >"$work/url$replica" &
    running+=($!)
    until [[ -s $work/url$replica ]]; do sleep 0.1; done
    urls+=("$(head -n 1 "$work/url$replica")")
done
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port=$(free_port)
"$folder/bin/vllm-router" --host 127.0.0.1 --port "$port" --worker-urls "${urls[@]}" --policy cache_aware \
    --prometheus-port "$(free_port)" --log-level warning >"$work/router.log" 2>&1 &
running+=($!)

python3 - "http://127.0.0.1:$port" "${urls[@]}" <<'PY'
import json, sys, time, urllib.error, urllib.request

router, *replicas = sys.argv[1:]


def post(url, body):
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=60).read().decode()


def ask(number, **more):
    content = f"Conversation {number % 4}. " * 20 + str(number)
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "seed": number, "max_tokens": 6, **more}


for _ in range(100):
    try:
        post(router, ask(0))
        break
    except (urllib.error.URLError, ConnectionError):
        time.sleep(0.2)
else:
    sys.exit("the router never answered")
hashes = {json.load(urllib.request.urlopen(url + "/version"))["plan_hash"] for url in replicas}
assert len(hashes) == 1, hashes
text = lambda answer: json.loads(answer)["choices"][0]["message"]["content"]
for number in range(24):
    whole = text(post(router, ask(number)))
    assert whole == text(post(replicas[number % 2], ask(number))), number
    events = [line[6:] for line in post(router, ask(number, stream=True)).splitlines() if line.startswith("data: {")]
    pieces = (event["choices"][0]["delta"].get("content") or "" for event in map(json.loads, events))
    assert "".join(pieces) == whole, number
try:
    post(router, ask(0, temperature=9))
    sys.exit("a wrong request was taken")
except urllib.error.HTTPError as error:
    assert error.code == 400 and json.load(error)["error"]["code"] == "invalid_value"
print("both replicas answer alike, through the router and directly")
PY
