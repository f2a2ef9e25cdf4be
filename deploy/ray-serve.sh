#!/usr/bin/env bash
# Two replicas of `gemma4c serve` under Ray Serve (deploy/ray_serve.py), with a tiny random model on the CPU: every answer is the same, streamed or
# whole, whichever replica gives it. Needs Python 3 with venv; Ray is installed into .cache/ray the first time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${GEMMA4C_TOOLS:-$PWD/.cache}/ray
gemma4c=$(realpath "${GEMMA4C:-target/debug/gemma4c}")
[[ -x $gemma4c ]] || cargo build
if [[ ! -x $folder/bin/serve ]]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet 'ray[serve]' httpx
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$gemma4c" synth tiny-e -q q8_0 -o "$work/model.gguf"
"$gemma4c" compile "$work/model.gguf" -o "$work/plan.bin" --target cpu --ctx 1024
GEMMA4C=$gemma4c PLAN=$work/plan.bin PYTHONPATH=$PWD RAY_USAGE_STATS_ENABLED=0 "$folder/bin/python" - <<'PY'
import json, socket, urllib.request
import ray
from ray import serve
from deploy.ray_serve import app

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init(num_cpus=4, include_dashboard=False, logging_level="warning")
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(app)


def ask(number, **more):
    body = {"messages": [{"role": "user", "content": f"Number {number}"}], "seed": number, "max_tokens": 6, **more}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=60).read().decode()


text = lambda answer: json.loads(answer)["choices"][0]["message"]["content"]
for number in range(16):
    answers = {text(ask(number)) for _ in range(4)}
    events = [json.loads(line[6:]) for line in ask(number, stream=True).splitlines() if line.startswith("data: {")]
    answers.add("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
    assert len(answers) == 1, answers
replicas = serve.status().applications["default"].deployments["Gemma"].replica_states
assert sum(replicas.values()) == 2, replicas
serve.shutdown()
ray.shutdown()
print("two replicas under Ray Serve answer alike")
PY
