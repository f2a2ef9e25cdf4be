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
# Apart from the others: litellm asks for an older openai, and the types are those of the newest.
if [[ ! -x $folder/litellm/bin/litellm ]]; then
    python3 -m venv "$folder/litellm"
    "$folder/litellm/bin/pip" install --quiet litellm
fi
if [[ ! -d $folder/types/bin ]]; then
    python3 -m venv "$folder/types"
    "$folder/types/bin/pip" install --quiet openai
fi
if [[ ! -d $folder/ollama/bin ]]; then
    python3 -m venv "$folder/ollama"
    "$folder/ollama/bin/pip" install --quiet ollama
fi
if [[ ! -x $folder/anthropic/bin/python ]]; then
    python3 -m venv "$folder/anthropic"
    "$folder/anthropic/bin/pip" install --quiet anthropic openai
fi
if [[ ! -d $folder/npm/node_modules/ai ]]; then
    (cd "$folder/npm" && npm install --no-fund --no-audit --silent openai ai @ai-sdk/openai-compatible zod)
fi
if [[ ! -x $folder/npm/node_modules/.bin/codex ]]; then
    (cd "$folder/npm" && npm install --no-fund --no-audit --silent @openai/codex)
fi
cp scripts/clients/clients.mjs "$folder/npm/"

work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
"$gemma4c" synth tiny-e -q q8_0 -o "$work/model.gguf"
"$gemma4c" compile "$work/model.gguf" -o "$work/plan.bin" --target cpu --ctx 2048
"$gemma4c" serve "$work/plan.bin" --port 0 --alias tiny --log off >"$work/url" &
server=$!
until [[ -s $work/url ]]; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
url=$(head -n 1 "$work/url")
"$folder/venv/bin/python" scripts/clients/clients.py "$url"
"$folder/anthropic/bin/python" scripts/clients/messages.py "$url"
# It would fetch a list of prices.
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/litellm/bin/python" scripts/clients/clients.py "$url" litellm
"$folder/types/bin/python" scripts/clients/strict.py "$url"
"$folder/ollama/bin/python" scripts/clients/ollama_client.py "$url"
(cd "$folder/npm" && node clients.mjs "$url")
kill "$server"
wait "$server"

# Errors in the middle of a stream, as a server has them that gives its requests no time.
"$gemma4c" serve "$work/plan.bin" --port 0 --alias tiny --deadline 0 --log off >"$work/failing.url" &
server=$!
until [[ -s $work/failing.url ]]; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
"$folder/types/bin/python" scripts/clients/strict.py "$(head -n 1 "$work/failing.url")" failing
kill "$server"
wait "$server"

# Pictures and sounds, with the reference model that reads them, where it is.
golden=${GEMMA4C_GOLDEN:-../shared/golden}/vision
if [[ -e $golden/v_tiny_e.gguf ]]; then
    "$gemma4c" compile "$golden/v_tiny_e.gguf" --mmproj "$golden/v_tiny_e.mmproj.gguf" --image-tokens 70 -o "$work/seeing.bin" --target cpu --ctx 1024
    "$gemma4c" serve "$work/seeing.bin" --port 0 --alias tiny --log off >"$work/seeing.url" &
    server=$!
    until [[ -s $work/seeing.url ]]; do
        kill -0 "$server" || exit 1
        sleep 0.1
    done
    "$folder/venv/bin/python" scripts/clients/clients.py "$(head -n 1 "$work/seeing.url")" media
    "$folder/anthropic/bin/python" scripts/clients/messages.py "$(head -n 1 "$work/seeing.url")" media
    kill "$server"
    wait "$server"
else
    echo "NOT TRIED: pictures and sounds; there is no $golden" >&2
fi

# Codex, which speaks the Responses API: with a long context, and answers that a random model ends in time.
"$gemma4c" compile "$work/model.gguf" -o "$work/long.bin" --target cpu --ctx 8192
"$gemma4c" serve "$work/long.bin" --port 0 --alias tiny --max-output 40 --log off >"$work/long-url" &
server=$!
until [[ -s $work/long-url ]]; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
mkdir "$work/codex" "$work/repository"
echo 'Be brief.' >"$work/instructions.md"
(
    cd "$work/repository"
    export CODEX_HOME=$work/codex OPENAI_API_KEY=none
    provider=(-c model_provider=ours -c 'model_providers.ours.name="ours"' -c 'model_providers.ours.wire_api="responses"'
        -c "model_providers.ours.base_url=\"$(head -n 1 "$work/long-url")/v1\"" -c 'model_providers.ours.stream_max_retries=0')
    # A random model seldom comes to an end, so that the turn may be cut; its message must have arrived.
    "$folder/npm/node_modules/.bin/codex" exec --json -s read-only --skip-git-repo-check -m tiny "${provider[@]}" \
        -c "model_instructions_file=\"$work/instructions.md\"" 'Say hi' </dev/null >"$work/codex.json" 2>/dev/null || true
)
grep -q '"type":"agent_message"\|"type":"turn.completed"' "$work/codex.json" || {
    cat "$work/codex.json"
    exit 1
}
echo 'codex: ok'
kill "$server"
wait "$server"
server=
echo 'all clients work'
