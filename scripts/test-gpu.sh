#!/usr/bin/env bash
# What BENCHMARKS.md says under "Right", checked on this machine's NVIDIA GPU in one command. Needs the driver, NVRTC and the
# reference data; compute-sanitizer where it is installed; no Python, and no Rust where a binary is given.
set -euo pipefail

usage() {
    cat <<'USAGE'
scripts/test-gpu.sh [--binary PATH] [--golden FOLDER] [--scratch FOLDER] [--full] [--only NAME,…]
                    [--sequences N] [--enable-pass NAME]

  --binary PATH     the gemma4c to test; without it, one is built by `cargo build --release`
  --golden FOLDER   reference data (default: $GEMMA4C_GOLDEN, or ../shared/golden beside the repository)
  --scratch FOLDER  where plans, logs and random models are written and deleted again (default: /dev/shm, or $TMPDIR)
  --full            also `verify` random models of full size, with and without massive channels, and every kernel case under
                    compute-sanitizer; needs 30 GB of scratch
  --only NAME,…     only these checks: kernels goldens repeat chunks verify company perplexity memcheck racecheck full
  --models NAME,…   only these models of the reference data, such as e_tiny_q8_0 or massive/o_tiny_q8_0
  --device DEVICE   cuda (default), or sim or cpu: to try this script out where there is no GPU
  --sequences N     plans for so many sequences: a row's logits are also compared alone and in batches of up to N
  --enable-pass NAME  plans with a pass that must be asked for, such as gemm
  --jobs N          processes at a time (default: 8, or the number of cores if that is less)

The last lines are a table: what was checked, the figure, its limit, and whether it holds. Exit code 0 if all of it does, 1 if
something does not, 2 if it could not be checked.
USAGE
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# ---- arguments -----------------------------------------------------------------------------------------------------------

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
all_checks=(kernels goldens repeat chunks verify company perplexity memcheck racecheck full)
binary='' golden=${GEMMA4C_GOLDEN:-$repository/../shared/golden} scratch='' device=cuda only='' full=no sequences=1 passes=()
jobs=$(nproc) models=()
((jobs <= 8)) || jobs=8

while (($# > 0)); do
    case $1 in
    --binary | --golden | --scratch | --only | --models | --device | --jobs | --sequences | --enable-pass)
        (($# > 1)) || fail "$1 needs a value"
        case $1 in
        --binary) binary=$2 ;;
        --golden) golden=$2 ;;
        --scratch) scratch=$2 ;;
        --only) only=$2 ;;
        --models) IFS=, read -ra models <<<"$2" ;;
        --device) device=$2 ;;
        --jobs) jobs=$2 ;;
        --sequences) sequences=$2 ;;
        --enable-pass) passes+=(--enable-pass "$2") ;;
        esac
        shift 2
        ;;
    --full)
        full=yes
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) fail "unknown argument $1; --help lists them" ;;
    esac
done

[[ $device == cuda || $device == sim || $device == cpu ]] || fail "--device $device: there are cuda, sim and cpu"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs: a number from 1 on is needed"
[[ $sequences =~ ^[1-9][0-9]*$ ]] || fail "--sequences $sequences: a number from 1 on is needed"
[[ $device != cpu || $sequences == 1 ]] || fail '--sequences is about GPUs'
for name in ${only//,/ }; do
    [[ " ${all_checks[*]} " == *" $name "* ]] || fail "--only $name: there are ${all_checks[*]}"
done

# wants CHECK: whether it is to run.
wants() {
    if [[ -n $only ]]; then
        [[ ,$only, == *",$1,"* ]]
    else
        [[ $1 != full || $full == yes ]]
    fi
}

# model_of NAME: where a model of the reference data is, below its folder.
model_of() {
    if [[ $1 == checkpoints/* ]]; then printf '%s/config.json' "$1"; else printf '%s.gguf' "$1"; fi
}

# The models of the reference data. A file that is missing is an error, so that no check passes by finding nothing; of models that are not asked for none is needed.
text=(d_tiny_bf16 d_tiny_q4_k d_tiny_q4_k_m_lq d_tiny_q6_k d_tiny_q8_0 e_tiny_q4_0 e_tiny_q4_0_lq e_tiny_q8_0 m_tiny_q4_0 m_tiny_q8_0)
massive=(massive/o_tiny_q4_0 massive/o_tiny_q8_0)
trained=(trained/austen_q4_0 trained/austen_q8_0)
# Low-bit types, and checkpoints, which are folders.
formats=() checkpoints=()
for file in "$golden"/formats/*.golden.safetensors; do
    [[ ! -f $file ]] || formats+=("formats/$(basename "$file" .golden.safetensors)")
done
for file in "$golden"/checkpoints/*.golden.safetensors; do
    [[ ! -f $file ]] || checkpoints+=("checkpoints/$(basename "$file" .golden.safetensors)")
done
known=("${text[@]}" "${massive[@]}" "${trained[@]}" "${formats[@]}" "${checkpoints[@]}")
for name in "${models[@]}"; do
    [[ " ${known[*]} " == *" $name "* ]] || fail "--models $name: there are ${known[*]}"
done
((${#models[@]} > 0)) || models=("${known[@]}")
for name in "${models[@]}"; do
    for file in "$(model_of "$name")" "$name.golden.safetensors"; do
        [[ -f $golden/$file ]] || fail "$golden has no $file: --golden names the folder of the reference data"
    done
done
golden=$(cd "$golden" && pwd)

if [[ -z $binary ]]; then
    (cd "$repository" && cargo build --release --locked) || fail 'cargo build --release failed; --binary names a program that is built already'
    binary=$repository/target/release/gemma4c
fi
[[ -x $binary ]] || fail "$binary is not a program"
binary=$(cd "$(dirname "$binary")" && pwd)/$(basename "$binary")
doctor=$("$binary" doctor) || fail "$binary doctor failed"
printf '%s\n' "$doctor" >&2
if [[ $device == cuda ]]; then
    ! grep -q '^gpu  *none' <<<"$doctor" || fail "there is no GPU here: $(grep '^gpu' <<<"$doctor")"
fi

if [[ -z $scratch ]]; then
    scratch=${TMPDIR:-.}
    [[ ! -w /dev/shm ]] || scratch=/dev/shm
fi
[[ -d $scratch ]] || fail "--scratch $scratch: there is no such folder"
work=$(mktemp -d "$scratch/gemma4c-test.XXXXXX")
mkdir "$work/plans" "$work/jobs"

# ---- jobs ----------------------------------------------------------------------------------------------------------------

set -m
submitted=0

# submit CHECK WHAT COMMAND...: runs the command beside others, as soon as there is room. Its output is kept; what it tells by
# `say` stands in the table.
submit() {
    while (($(jobs -rp | wc -l) >= jobs)); do
        wait -n || true
    done
    printf -v job '%s/jobs/%04d' "$work" "$submitted"
    submitted=$((submitted + 1))
    run_job "$@" &
}

# alone CHECK WHAT COMMAND...: the same beside nobody: what looks at the GPU's free memory.
alone() {
    while (($(jobs -rp | wc -l) > 0)); do
        wait -n || true
    done
    submit "$@"
    wait || true
}

run_job() {
    local check=$1 what=$2 verdict=ok started=$SECONDS
    shift 2
    "$@" >"$job.log" 2>&1 || verdict=FAILED
    local figure='' limit=''
    [[ ! -f $job.said ]] || { read -r figure && read -r limit; } <"$job.said" || true
    [[ $verdict == ok ]] || figure=${figure:-'no figure: see its log above'}
    printf '%s\t%s\t%s\t%s\t%s\n' "$check" "$what" "${figure:-done}" "${limit:--}" "$verdict" >"$job.row"
    printf '%-8s %-10s %s (%d s)\n' "$verdict" "$check" "$what" $((SECONDS - started)) >&2
}

# say FIGURE LIMIT: for a job's row of the table.
say() {
    printf '%s\n%s\n' "$1" "$2" >"$job.said"
}

finish() {
    local code=$?
    trap - EXIT
    # Nothing of ours goes on in a folder that is deleted. A job is a process group of its own.
    local job_id
    for job_id in $(jobs -rp); do
        kill -- "-$job_id" 2>/dev/null || true
    done
    wait || true
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

# ---- plans ---------------------------------------------------------------------------------------------------------------

# plan_of MODEL [KIND]: the plan's file.
plan_of() {
    printf '%s/plans/%s%s.bin' "$work" "${1//\//-}" "${2:+.$2}"
}

# compile MODEL KIND OPTION...: a plan with room for the longest window of reference data.
compile() {
    local model=$1 kind=$2
    shift 2
    "$binary" compile "$golden/$(model_of "$model")" -o "$(plan_of "$model" "$kind")" --ctx 1024 "$@"
}

case $device in
cuda) target=(--target cuda --sequences "$sequences" "${passes[@]}") ;;
# A phase's rows are computed whether they are there or not, which a simulator takes long for.
sim) target=(--target cuda --arch sm_90a --chunk 16 --sequences "$sequences" "${passes[@]}") ;;
cpu) target=(--target cpu) ;;
esac

started=$SECONDS
for model in "${models[@]}"; do
    submit compile "$model" compile "$model" '' "${target[@]}"
    if wants perplexity && [[ $model == trained/* ]]; then
        submit compile "$model, bf16 keys" compile "$model" bf16 "${target[@]}" --kv bf16
        submit compile "$model, cpu" compile "$model" cpu --target cpu
    fi
done
wait
compiled=$((SECONDS - started))

# ---- checks --------------------------------------------------------------------------------------------------------------

# tokens N: so many ids that every vocabulary has, the same each time.
tokens() {
    local i ids=2
    for ((i = 1; i < $1; i++)); do
        ids+=,$(((i * i * 31 + i * 17 + 5) % 500))
    done
    printf '%s' "$ids"
}

logits() { # logits MODEL OUT OPTION...
    local model=$1 out=$2
    shift 2
    "$binary" logits "$(plan_of "$model")" -o "$out" --device "$device" "$@"
}

# The prompt by prefill and its continuation token by token, against transformers.
check_golden() {
    local model=$1 limits=() report code=0
    # The CPU computes in f32, whose limits are the program's own.
    case $device:$model in
    cpu:*) ;;
    *:*bf16) limits=(--limit-rms 0.03 --limit-row 0.06 --limit-max 0.2 --clear-margin 0.2) ;;
    *:massive/*) limits=(--limit-rms 0.2 --limit-row 1.6 --limit-max 1.6) ;;
    esac
    report=$("$binary" verify "$(plan_of "$model")" --device "$device" \
        --golden "$golden/$model.golden.safetensors" "${limits[@]}") || code=$?
    printf '%s\n' "$report"
    local figures
    figures=$(grep -E '^[0-9]+ rows: ' <<<"$report") || return 1
    say "$(sed -E 's/ of [0-9.e+-]+//g' <<<"$figures")" \
        "$(grep -oE ' of [0-9.e+-]+' <<<"$figures" | cut -c5- | paste -sd' ')"
    return "$code"
}

# The same bytes from run to run.
check_repeat() {
    local model=$1 run differing=0 runs=20
    for ((run = 0; run < runs; run++)); do
        logits "$model" "$job.$run" --tokens "$(tokens 59)" --all --prefill 40 || return 1
        cmp "$job.0" "$job.$run" || differing=$((differing + 1))
        ((run == 0)) || rm "$job.$run"
    done
    say "$runs runs of 59 tokens, $differing of them other bytes" '0'
    ((differing == 0))
}

# The same bytes however a prompt is cut.
check_chunks() {
    local model=$1 chunk differing=0
    logits "$model" "$job.whole" --tokens "$(tokens 100)" --all || return 1
    for chunk in 7 16 64; do
        logits "$model" "$job.cut" --tokens "$(tokens 100)" --all --chunk "$chunk" || return 1
        cmp "$job.whole" "$job.cut" || differing=$((differing + 1))
    done
    say "100 tokens in chunks of 7, 16 and 64, $differing of them other bytes" '0'
    ((differing == 0))
}

# Every launch alone and all together, against the CPU.
check_verify() { # check_verify PLAN
    local report code=0
    report=$("$binary" verify "$1" --device "$device") || code=$?
    printf '%s\n' "$report"
    local of_phases='/^  phase  .*launches/ { inside = 1; next } /^$/ { inside = 0 } inside'
    say "$(awk -F'  +' "$of_phases"' { printf "%s%s %s", separator, $2, $6; separator = ", " }' <<<"$report")" \
        "$(awk -F'  +' "$of_phases"' { print $7 }' <<<"$report" | sort -u | paste -sd' ')"
    return "$code"
}

check_kernels() {
    local report code=0
    report=$("$binary" kernels --check --device "$device") || code=$?
    printf '%s\n' "$report"
    say "$(awk '$1 == "all" { print $3 " of " $2 " cases" }' <<<"$report")" 'all'
    return "$code"
}

# sanitize TOOL ARGUMENT...: gemma4c with these arguments makes no stray access, or has no race in shared memory.
sanitize() {
    local tool=$1 code=0 summary
    shift
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$binary" "$@" --device "$device" >"$job.sanitizer" 2>&1 || code=$?
    tail -n 200 "$job.sanitizer"
    summary=$(grep -E 'SUMMARY: ' "$job.sanitizer" | tail -n 1 | sed -E 's/^=+ //')
    say "${summary:-no summary}" '0'
    ((code == 0)) && [[ $summary =~ SUMMARY:\ 0\  ]]
}

# windows FILE: the rows of its tensor `windows`, a line each. A safetensors file is the length of a header, the header and the data.
windows() {
    local file=$1 length header
    length=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    header=$(head -c $((8 + length)) "$file" | tail -c "$length")
    local entry='"windows":\{"dtype":"I32","shape":\[[0-9]+,([0-9]+)\],"data_offsets":\[([0-9]+),([0-9]+)\]\}'
    [[ $header =~ $entry ]] || return 1
    local columns=${BASH_REMATCH[1]} first=${BASH_REMATCH[2]} end=${BASH_REMATCH[3]}
    od -An -v -td4 -w$((columns * 4)) -j $((8 + length + first)) -N $((end - first)) "$file"
}

# A row's logits alone and in batches, to the bit.
check_company() { # check_company PLAN
    local report code=0 batches='' rows
    for ((rows = 2; rows < sequences; rows *= 2)); do batches+=$rows,; done
    report=$("$binary" verify "$1" --device "$device" --company "$batches$sequences") || code=$?
    printf '%s\n' "$report"
    local figures
    figures=$(awk '/ rows, [0-9]+ differ$/ { rows += $(NF - 3); unlike += $(NF - 1) }
        END { print rows " rows, " unlike " differ" }' <<<"$report")
    say "batches of $batches$sequences: $figures" '0'
    return "$code"
}

# check_perplexity MODEL KIND OPTION...: held-out text, and how far the distribution is from the CPU's.
check_perplexity() {
    local model=$1 kind=$2 report expected
    shift 2
    # What transformers computes. The limits: ten times what the rounding of activations to 8 bits has cost so far.
    case $model in
    *q8_0) expected=3.587098 ;;
    *) expected=3.612617 ;;
    esac
    local most_nll=0.005 most_kl=0.003
    [[ $device != cpu ]] || most_nll=0.00001 most_kl=0
    windows "$golden/$model.golden.safetensors" >"$job.windows" || {
        printf 'there is no tensor "windows" for %s\n' "$model"
        return 1
    }
    report=$("$binary" perplexity "$(plan_of "$model" "$kind")" --device "$device" --tokens "$job.windows" \
        --against "$(plan_of "$model" cpu)" --against-device cpu -o json "$@") || return 1
    printf '%s\n' "$report"
    local nll kl_mean kl_p99 same_top
    for key in nll kl_mean kl_p99 same_top; do
        printf -v "$key" '%s' "$(sed -nE "s/^ *\"$key\": ([-0-9.e]+),?$/\1/p" <<<"$report")"
    done
    [[ -n $nll && -n $kl_mean && -n $kl_p99 && -n $same_top ]] || return 1
    say "$(printf 'nll %.6f, KL mean %.2e, 99 %% %.2e, same top %.4f' "$nll" "$kl_mean" "$kl_p99" "$same_top")" \
        "$expected +- $most_nll, KL mean $most_kl"
    awk -v nll="$nll" -v expected="$expected" -v most="$most_nll" -v kl="$kl_mean" -v most_kl="$most_kl" \
        'BEGIN { off = nll - expected; if (off < 0) off = -off; exit !(off <= most && kl <= most_kl && kl >= -1e-9) }'
}

# check_full PRESET TYPE OPTION...: a random model of full size.
check_full() {
    local preset=$1 type=$2 code=0
    shift 2
    "$binary" synth "$preset" -q "$type" "$@" -o "$job.gguf" &&
        "$binary" compile "$job.gguf" -o "$job.bin" "${target[@]}" && check_verify "$job.bin" || code=1
    rm -f "$job.gguf" "$job.bin"
    return "$code"
}

there=()
for model in "${models[@]}"; do
    [[ ! -f $(plan_of "$model") ]] || there+=("$model")
done

# taken_by CHECK: the models that it is for, of those that have a plan.
taken_by() {
    local model
    for model in "${there[@]}"; do
        case $1:$model in
        repeat:d_tiny_q4_k | repeat:e_tiny_q8_0 | repeat:m_tiny_q8_0) ;;
        perplexity:trained/*) ;;
        repeat:* | perplexity:*) continue ;;
        esac
        printf '%s\n' "$model"
    done
}

# Why a check cannot run here; nothing, if it can.
obstacle() {
    case $1:$device in
    kernels:cpu | verify:cpu | full:cpu) printf 'the CPU is what a device is compared with' ;;
    memcheck:cpu | memcheck:sim | racecheck:cpu | racecheck:sim) printf 'there is no GPU' ;;
    memcheck:cuda | racecheck:cuda)
        command -v compute-sanitizer >/dev/null || printf 'compute-sanitizer is not on the PATH'
        ;;
    company:*) ((sequences > 1)) || printf 'the plans are for one sequence: --sequences' ;;
    repeat:* | perplexity:*)
        [[ -n $(taken_by "$1") ]] || printf 'it is for none of these models'
        ;;
    esac
}

# runs CHECK: whether it is wanted, and can run. What is left out is said, here and in the table.
not_run=()
runs() {
    wants "$1" || return 1
    local why
    why=$(obstacle "$1")
    [[ -n $why ]] || return 0
    not_run+=("$1")
    printf 'NOT RUN: %s: %s\n' "$1" "$why" >&2
    printf '%s\t%s\t%s\t%s\t%s\n' "$1" - "$why" - 'NOT RUN' >"$work/jobs/$1.row"
    return 1
}

# What takes longest first, so that it does not run alone in the end.
if runs kernels; then submit kernels 'every case' check_kernels; fi
for tool in racecheck memcheck; do
    if runs "$tool"; then
        if [[ $full == yes ]]; then submit "$tool" 'every kernel case' sanitize "$tool" kernels --check; fi
        # A prompt, and a few tokens decoded.
        for model in "${there[@]}"; do
            submit "$tool" "$model" sanitize "$tool" logits "$(plan_of "$model")" \
                -o "$work/${model//\//-}.$tool" --tokens "$(tokens 43)" --prefill 40
        done
    fi
done
if runs repeat; then
    for model in $(taken_by repeat); do submit repeat "$model" check_repeat "$model"; done
fi
if runs perplexity; then
    for model in $(taken_by perplexity); do
        submit perplexity "$model, prefill" check_perplexity "$model" ''
        submit perplexity "$model, decode" check_perplexity "$model" '' --decode
        submit perplexity "$model, prefill, bf16 keys" check_perplexity "$model" bf16
        submit perplexity "$model, decode, bf16 keys" check_perplexity "$model" bf16 --decode
    done
fi
if runs verify; then
    for model in "${there[@]}"; do submit verify "$model" check_verify "$(plan_of "$model")"; done
fi
if runs company; then
    for model in "${there[@]}"; do alone company "$model" check_company "$(plan_of "$model")"; done
fi
if runs goldens; then
    for model in "${there[@]}"; do submit goldens "$model" check_golden "$model"; done
fi
if runs chunks; then
    for model in "${there[@]}"; do submit chunks "$model" check_chunks "$model"; done
fi
wait

# One at a time: each takes all cores, and gigabytes of scratch.
if runs full; then
    for options in '' --massive; do
        for size in 'e4b q8_0' '26b-a4b q4_0'; do
            # shellcheck disable=SC2086 # several words, or none
            submit full "$size${options:+ $options}" check_full $size $options
            wait
        done
    done
fi

# ---- the table -----------------------------------------------------------------------------------------------------------

failed=0
for row in "$work"/jobs/*.row; do
    if [[ $(cut -f5 "$row") == FAILED ]]; then
        failed=$((failed + 1))
        printf '\n==> %s\n' "$(cut -f1,2 "$row")" >&2
        tail -n 25 "${row%.row}.log" >&2
    fi
done

# table CHECK: its rows, in the order they were submitted; those that say the same are one.
table() {
    local nouns=models
    case $1 in
    compile) nouns=plans ;;
    perplexity) nouns=runs ;;
    esac
    cat "$work"/jobs/*.row | awk -F'\t' -v check="$1" -v nouns="$nouns" '
        $1 != check { next }
        { key = $3 FS $4 FS $5 FS ($5 == "FAILED" ? $2 : "") }
        !(key in count) { order[++keys] = key }
        { what[key] = count[key]++ ? count[key] " " nouns : $2 }
        END {
            for (i = 1; i <= keys; i++) {
                split(order[i], row, FS)
                limit = row[2] == "-" ? "" : " (" row[2] ")"
                printf "%-11s %-38s %-8s %s%s\n", check, what[order[i]], row[3], row[1], limit
            }
        }'
}

printf '\n%-11s %-38s %-8s %s\n' check what '' 'figure (limit)'
for check in compile "${all_checks[@]}"; do
    table "$check"
done
checked=$(cat "$work"/jobs/*.row | awk -F'\t' '$1 != "compile" && $5 != "NOT RUN"' | wc -l)
printf '\n%d checks, %d failed, %d s, of which compiling took %d' "$checked" "$failed" "$SECONDS" "$compiled"
((${#not_run[@]} == 0)) || printf '; NOT RUN: %s' "${not_run[*]}"
printf '\n'
((checked > 0)) || fail 'nothing was checked'
((failed == 0))
