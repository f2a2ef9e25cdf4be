#!/usr/bin/env bash
# A server at 80 % of its capacity for SECONDS (480): requests arrive at random times, some of them by a JSON schema. Afterwards the first SAMPLE
# (50) requests are made once more, alone: their answers must be the same, bit by bit. Then nobody runs, waits or owns a block.
#
# usage: soak-gpu.sh MODEL_OR_PLAN [SECONDS [SAMPLE]]     environment: GEMMA4C (the program), SEQUENCES (64), PROMPT (512), GENERATE (256),
#        SERVE (more options of `gemma4c serve`)
set -euo pipefail
gemma4c=${GEMMA4C:-gemma4c}
model=$1 seconds=${2:-480} sample=${3:-50}
sequences=${SEQUENCES:-64}
work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

# shellcheck disable=SC2086
"$gemma4c" serve "$model" --port 0 --sequences "$sequences" --max-waiting 4096 --max-waiting-tokens 100000000 ${SERVE:-} --log off >"$work/url" &
server=$!
until [[ -s $work/url ]]; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
url=$(head -n 1 "$work/url")
field() { python3 -c "import json, sys; print(round(json.load(open(sys.argv[1]))[sys.argv[2]], 3))" "$1" "$2"; }
metric() { python3 -c "
import sys, urllib.request
text = urllib.request.urlopen(sys.argv[1] + '/metrics').read().decode()
print(next(line for line in text.splitlines() if line.startswith(sys.argv[2] + '{')).rsplit(' ', 1)[1])" "$url" "$1"; }
memory() { awk '/^VmRSS/ { print int($2 / 1024) }' "/proc/$server/status"; }
load() { "$gemma4c" load "$url" -p "${PROMPT:-512}" -n "${GENERATE:-256}" --guided 10 "$@"; }

load --seed 1 --requests $((3 * sequences)) --concurrency "$sequences" --json "$work/capacity.json" >/dev/null
capacity=$(field "$work/capacity.json" request_throughput)
rate=$(python3 -c "print(round(0.8 * $capacity, 3))")
requests=$(python3 -c "print(max($sample, int($rate * $seconds)))")
before=$(memory)
load --seed 2 --requests "$requests" --rate "$rate" --json "$work/soak.json" --answers "$work/soak.txt" >"$work/soak.out"
after=$(memory)
load --seed 2 --requests "$sample" --concurrency 1 --answers "$work/alone.txt" >/dev/null
same=$(head -n "$sample" "$work/soak.txt" | paste -d '\n' - "$work/alone.txt" | awk 'NR % 2 { one = $0; next } one == $0 && one != "null" { n++ } END { print n + 0 }')
running=$(metric vllm:num_requests_running)
waiting=$(metric vllm:num_requests_waiting)
blocks=$(metric vllm:kv_cache_usage_perc)
kill "$server"
wait "$server"
server=

echo "capacity                  $capacity requests/s"
echo "arrivals                  $rate requests/s for $seconds s: $requests requests, $(field "$work/soak.json" completed) answered"
echo "output                    $(field "$work/soak.json" output_throughput) tokens/s"
echo "first token, p50 and p99  $(field "$work/soak.json" median_ttft_ms) ms, $(field "$work/soak.json" p99_ttft_ms) ms"
echo "gap, p50 and p99          $(field "$work/soak.json" median_itl_ms) ms, $(field "$work/soak.json" p99_itl_ms) ms"
echo "same bits as alone        $same of $sample"
echo "afterwards                $running running, $waiting waiting, $blocks of all blocks in use"
echo "host memory               $before MiB before, $after MiB after"
[[ $(field "$work/soak.json" completed) == "$requests" && $same == "$sample" && $running == 0 && $waiting == 0 && $blocks == 0 ]] || exit 1
echo 'nothing was lost'
