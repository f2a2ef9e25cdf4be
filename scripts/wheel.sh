#!/usr/bin/env bash
# Builds the Python wheel and tests it as a user gets it: installed in fresh virtual environments of Python 3.9 and 3.13 (or those that
# PYTHONS names), with what pip fetches for it, the notebook and `uvx` included. Needs Rust, a Python 3 with venv, and a network.
# `wheel.sh --dev` builds without optimising, for whoever changes the module; `wheel.sh FILE.whl` tests a wheel that was built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
folder=$root/.cache/wheel
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target} PIP_DISABLE_PIP_VERSION_CHECK=1
# Plans and kernels of this run alone, and NVRTC from its package alone.
export GEMMA4C_CACHE=$folder/cache
unset GEMMA4C_NVRTC VIRTUAL_ENV

# glibc 2.17, which is what manylinux2014 promises: linked by zig, which has the symbols of every glibc.
how=(--release --zig --compatibility manylinux2014)
[[ ${1:-} != --dev ]] || how=(--profile dev --compatibility linux)

# python VERSION: an interpreter of that version, wherever one is kept.
python() {
    local found
    for found in "$(command -v "python$1")" ~/.pyenv/versions/"$1".*/bin/python /opt/python/"$1".*/bin/python; do
        if [[ -x $found && $("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]]; then
            printf '%s\n' "$found"
            return
        fi
    done
    printf 'missing: there is no Python %s; install one, or name others: PYTHONS="3.11 3.12" %s\n' "$1" "$0" >&2
    return 1
}

tools=$folder/tools
if [[ ! -x $tools/bin/uv ]]; then
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet 'maturin>=1.9,<2' ziglang uv
fi
rm -rf "$folder/cache"
if [[ ${1:-} == *.whl ]]; then
    wheel=$(realpath "$1")
else
    (cd python && cargo fmt --check && cargo clippy --locked --quiet --config ../Cargo.toml -- -D warnings)
    rm -rf "$folder/dist"
    (cd python && PATH=$tools/bin:$PATH maturin build --locked "${how[@]}" --out "$folder/dist")
    wheel=$(ls "$folder"/dist/*.whl)
fi
printf '\n%s: %s bytes\n' "$(basename "$wheel")" "$(stat -c %s "$wheel")"

cargo build --locked --quiet -p gemma4c-hub-standin
export GEMMA4C_HUB_STANDIN=$CARGO_TARGET_DIR/debug/gemma4c-hub-standin
for version in ${PYTHONS:-3.9 3.13}; do
    printf '\n==> Python %s\n' "$version"
    environment=$folder/$version
    rm -rf "$environment"
    "$(python "$version")" -m venv "$environment"
    "$environment/bin/pip" install --quiet "$wheel" pytest
    # From elsewhere, so that the package is the installed one.
    (cd "$folder" && "$environment/bin/python" -m pytest --quiet -p no:cacheprovider "$root/python/tests")
done

printf '\n==> stubs, notebook and uvx\n'
"$environment/bin/pip" install --quiet mypy nbclient ipykernel
(cd "$folder" && "$environment/bin/python" -m mypy.stubtest gemma4c)
(cd "$folder" && "$environment/bin/python" "$root/python/tests/run_notebook.py" "$root/examples/python.ipynb")
(cd "$folder" && "$tools/bin/uvx" --quiet --python "$environment/bin/python" --from "$wheel" gemma4c --version)
printf '\nthe wheel works: %s\n' "$wheel"
