#!/usr/bin/env bash
# Answers of a tiny random model to 500 random JSON schemas (serve/tests/it/schemas.rs), then to every schema of the official JSON-Schema-Test-Suite
# (draft 2020-12), as response_format and as a tool's parameters; all of them judged by the `jsonschema` package from PyPI, whose source package
# carries the suite. GEMMA4C names the program to ask, `test-schemas.sh 0` leaves the random schemas out.
# Needs Python 3 with venv, and a network for the first run. What is installed is kept in .cache/clients.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${GEMMA4C_TOOLS:-$PWD/.cache}/clients
count=${1:-500}
[[ -x $folder/venv/bin/python ]] || python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -c 'import jsonschema' 2>/dev/null || "$folder/venv/bin/pip" install --quiet jsonschema
suite=$folder/json-schema-test-suite
if [[ ! -d $suite/draft2020-12 ]]; then
    download=$(mktemp -d)
    "$folder/venv/bin/pip" download --quiet --no-deps --no-binary :all: jsonschema==4.26.0 -d "$download"
    tar -xzf "$download"/jsonschema-*.tar.gz -C "$download"
    mkdir -p "$suite"
    mv "$download"/jsonschema-*/json/tests/draft2020-12 "$suite/"
    rm -rf "$download"
fi

work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
if [[ $count != 0 ]]; then
    GEMMA4C_SCHEMAS=$count GEMMA4C_ANSWERS=$work/answers cargo test -q -p gemma4c-serve --test it -- answers_follow_random_schemas
    "$python" scripts/schemas.py answers "$work/answers"
fi

gemma4c=${GEMMA4C:-target/debug/gemma4c}
[[ -x $gemma4c ]] || cargo build
"$gemma4c" synth tiny-e -q q8_0 -o "$work/model.gguf"
"$gemma4c" compile "$work/model.gguf" -o "$work/plan.bin" --target cpu --ctx 2048
"$gemma4c" serve "$work/plan.bin" --sequences 32 --port 0 --alias tiny >"$work/url" 2>"$work/log" &
server=$!
until [[ -s $work/url ]]; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
"$python" scripts/schemas.py suite "$suite/draft2020-12" "$(head -n 1 "$work/url")"
kill "$server"
wait "$server"
server=
