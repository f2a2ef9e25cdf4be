#!/usr/bin/env bash
# A server with a tiny random model on the CPU under REQUESTS (10000) requests, of which some are garbage and some are cut: scripts/soak.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gemma4c=${GEMMA4C:-target/debug/gemma4c}
[[ -x $gemma4c ]] || cargo build
work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
"$gemma4c" synth tiny-dense --layers 2 -q q8_0 -o "$work/model.gguf"
"$gemma4c" compile "$work/model.gguf" -o "$work/plan.bin" --target cpu --ctx 1024
"$gemma4c" serve "$work/plan.bin" --port 0 --sequences 16 --log off >"$work/url" &
server=$!
until [[ -s $work/url ]]; do sleep 0.1; done
python3 scripts/soak.py "$(head -n 1 "$work/url")" "$server" "${1:-10000}"
kill "$server"
wait "$server"
server=
echo 'nothing was lost'
