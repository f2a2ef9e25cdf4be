#!/usr/bin/env bash
# Installs the clients that people use and runs them against `gemma4c serve` with a tiny random model on the CPU. Needs Python 3 with venv,
# node with npm, and a network for the first run. What is installed is kept in .cache/clients.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${GEMMA4C_TOOLS:-$PWD/.cache}/clients
gemma4c=${GEMMA4C:-target/debug/gemma4c}
[[ -x $gemma4c ]] || cargo build

mkdir -p "$folder/npm"
if [[ ! -x $folder/venv/bin/llm ]]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet openai langchain-openai instructor 'pydantic-ai-slim[openai]' llm
fi
if [[ ! -d $folder/npm/node_modules/ai ]]; then
    (cd "$folder/npm" && npm install --no-fund --no-audit --silent openai ai @ai-sdk/openai-compatible zod)
fi
cp scripts/clients/clients.mjs "$folder/npm/"

work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
"$gemma4c" synth tiny-e -q q8_0 -o "$work/model.gguf"
"$gemma4c" compile "$work/model.gguf" -o "$work/plan.bin" --target cpu --ctx 2048
"$gemma4c" serve "$work/plan.bin" --port 0 --alias tiny >"$work/url" &
server=$!
for _ in $(seq 100); do
    [[ -s $work/url ]] && break
    sleep 0.1
done
url=$(head -n 1 "$work/url")
"$folder/venv/bin/python" scripts/clients/clients.py "$url"
(cd "$folder/npm" && node clients.mjs "$url")
kill "$server"
wait "$server"
server=
echo 'all clients work'
