#!/usr/bin/env bash
# Answers of a tiny random model to 500 random JSON schemas (serve/tests/it/schemas.rs), checked once more by the `jsonschema` package from PyPI.
# Needs Python 3 with venv, and a network for the first run. What is installed is kept in .cache/clients.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${GEMMA4C_TOOLS:-$PWD/.cache}/clients
[[ -x $folder/venv/bin/python ]] || python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -c 'import jsonschema' 2>/dev/null || "$folder/venv/bin/pip" install --quiet jsonschema

answers=$(mktemp)
trap 'rm -f "$answers"' EXIT
GEMMA4C_SCHEMAS=${1:-500} GEMMA4C_ANSWERS=$answers cargo test -q -p gemma4c-serve --test it -- answers_follow_random_schemas
"$folder/venv/bin/python" - "$answers" <<'EOF'
import json
import sys

import jsonschema

counts = {}
for line in open(sys.argv[1]):
    answer = json.loads(line)
    counts[answer["finish_reason"]] = counts.get(answer["finish_reason"], 0) + 1
    jsonschema.Draft202012Validator.check_schema(answer["schema"])
    if answer["finish_reason"] == "stop":
        jsonschema.Draft202012Validator(answer["schema"]).validate(json.loads(answer["text"]))
print(f"all answers that ended are valid: {counts}")
EOF
