#!/usr/bin/env bash
# Everything that must hold before a change is merged, in one command. Needs Rust (with rustfmt and clippy), a C++ compiler
# and Python 3 with pip; no GPU and no CUDA toolkit. The first run fetches crates and NVRTC, later runs need no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One exact version: the tables of registers and spills under snapshots/ are its results.
nvrtc_version=13.0.88
nvrtc_folder=.cache/nvrtc

stage_names=()
stage_seconds=()

# stage NAME COMMAND...: runs the command and remembers how long it took.
stage() {
    local name=$1 start=$SECONDS
    shift
    printf '\n==> %s\n' "$name" >&2
    stage_names+=("$name")
    "$@" || {
        printf '\nFAILED: %s\n' "$name" >&2
        exit 1
    }
    stage_seconds+=($((SECONDS - start)))
}

report_times() {
    printf '\n%-10s %8s\n' stage seconds >&2
    local i
    for i in "${!stage_names[@]}"; do
        printf '%-10s %8s\n' "${stage_names[i]}" "${stage_seconds[i]:-failed}" >&2
    done
    printf '%-10s %8s\n' total "$SECONDS" >&2
    report_not_checked
}
trap report_times EXIT

# Tests that found no data or no tool pass, and append what they left out to this list: the last line says how many.
export GEMMA4C_NOT_CHECKED="$PWD/.cache/not-checked"
mkdir -p .cache
rm -f "$GEMMA4C_NOT_CHECKED"

report_not_checked() {
    local count=0
    if [[ -f $GEMMA4C_NOT_CHECKED ]]; then
        count=$(wc -l <"$GEMMA4C_NOT_CHECKED")
        printf '\n' >&2
        sort "$GEMMA4C_NOT_CHECKED" >&2
    fi
    printf '\nNOT CHECKED: %s tests, or parts of them, found no data or no tool\n' "$count" >&2
}

check_tools() {
    local missing=0
    need() { # need WHAT-TO-DO COMMAND...
        local remedy=$1
        shift
        "$@" >/dev/null 2>&1 || {
            printf 'missing: `%s` does not run; %s\n' "$*" "$remedy" >&2
            missing=1
        }
    }
    need 'install Rust with rustup' cargo --version
    need 'rustup component add rustfmt' cargo fmt --version
    need 'rustup component add clippy' cargo clippy --version
    need 'install a C++ compiler (g++ or clang++), or name one in $CXX' "${CXX:-c++}" --version
    return "$missing"
}

# NVRTC as NVIDIA ships it for Python: two libraries that need no installation.
fetch_nvrtc() {
    if [[ -n ${GEMMA4C_NVRTC:-} ]]; then
        printf 'taken from GEMMA4C_NVRTC=%s\n' "$GEMMA4C_NVRTC" >&2
        return
    fi
    if [[ ! -d $nvrtc_folder/nvidia_cuda_nvrtc-$nvrtc_version.dist-info ]]; then
        local instead='or set GEMMA4C_NVRTC to a libnvrtc.so.13 that is here already'
        python3 -m pip --version >/dev/null 2>&1 || {
            printf 'missing: `python3 -m pip` does not run; install Python 3 with pip, %s\n' "$instead" >&2
            return 1
        }
        rm -rf "$nvrtc_folder" "$nvrtc_folder.partial"
        # As variables, because an older pip refuses options it does not know.
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-deps \
            --target "$nvrtc_folder.partial" "nvidia-cuda-nvrtc==$nvrtc_version" || {
            printf 'could not fetch nvidia-cuda-nvrtc %s with pip: is there a network? Else %s\n' \
                "$nvrtc_version" "${instead#or }" >&2
            return 1
        }
        mv "$nvrtc_folder.partial" "$nvrtc_folder" || return 1
    fi
    export GEMMA4C_NVRTC="$PWD/$nvrtc_folder"
    printf 'NVRTC %s in %s\n' "$nvrtc_version" "$nvrtc_folder" >&2
}

# A missing NVRTC, a missing C++ compiler and a new or changed snapshot are failures here, not notes.
export CI=true GEMMA4C_REQUIRE_NVRTC=1 INSTA_UPDATE=no
# Everything is compiled once: one unit a crate takes two thirds of the time of sixteen, and no time for what only a second build would use.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_CODEGEN_UNITS=1
# Not the user's own cache: every run starts from what this tree compiled.
export GEMMA4C_CACHE="$PWD/.cache/gemma4c"

stage tools check_tools
stage nvrtc fetch_nvrtc
stage fmt cargo fmt --all --check
stage clippy cargo clippy --locked --workspace --all-targets -- -D warnings
stage build cargo test --locked --workspace --no-run
stage test cargo test --locked --workspace
