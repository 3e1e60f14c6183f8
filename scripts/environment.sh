#!/usr/bin/env bash
# Sourced by run_train.sh and run_tests.sh: puts a Python environment with torchtitan in front of
# PATH.
#   use_environment [EXTRA]
#       EXTRA: an optional dependency group of pyproject.toml, such as dev; empty: none
# An active environment that has the package, and the packages of EXTRA, is used unchanged.
# Otherwise .venv in the checkout is created and filled on first use, and again when pyproject.toml
# or constraints.txt have changed. A supported torch for CUDA that PYTHON has is used from there,
# instead of downloading one.

root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

active_environment_suffices() {
    local packages=(torchtitan)
    case "$1" in
        dev)
            packages+=(pytest pytest-xdist ruff mypy codespell mkdocs-material mkdocstrings-python)
            packages+=(transformers pillow starlette uvicorn diffusers)
            ;;
        classify) packages+=(scikit-learn) ;;
        diffusion) packages+=(transformers pillow diffusers) ;;
        docs) packages+=(mkdocs-material mkdocstrings-python) ;;
        eval) packages+=(lm-eval) ;;
        fla) packages+=(fla-core) ;;
        openenv) packages+=(openenv) ;;
        verifiers) packages+=(verifiers) ;;
        gguf) packages+=(gguf) ;;
        math) packages+=(math-verify) ;;
        mergekit) packages+=(mergekit) ;;
        quantization) packages+=(torchao) ;;
        sentencepiece) packages+=(sentencepiece) ;;
        serve) packages+=(starlette uvicorn) ;;
        transformers) packages+=(transformers) ;;
        vision) packages+=(transformers pillow) ;;
        vllm) packages+=(vllm) ;;
        wandb) packages+=(wandb) ;;
        "") ;;
        *)
            echo "EXTRA is '$1', but must be one of classify, dev, diffusion, docs, eval, fla," \
                "gguf, math, mergekit, openenv, quantization, sentencepiece, serve, transformers," \
                "verifiers, vision, vllm, wandb" >&2
            exit 2
            ;;
    esac
    # -P: the checkout itself, if it is the current folder, does not count as installed. Another
    # distribution may have the package's name, but not our command.
    local search='import sys, importlib.metadata as m, importlib.util as u; '
    search+='[m.version(name) for name in sys.argv[1:]]; '
    search+='sys.exit(u.find_spec("torchtitan.cli.main") is None)'
    python -P -c "$search" "${packages[@]}" 2>/dev/null
}

use_environment() {
    local extra=${1:-} venv=$root/.venv python=${PYTHON:-python3} state
    # A build for CUDA of a supported version, which takes gigabytes to download.
    local has_torch='import sys, torch; '
    has_torch+='sys.exit(not (torch.version.cuda and torch.__version__ >= (2, 11)))'
    # Also if the active environment suffices, since then the mistake would have no effect.
    if [ -n "${PYTHON:-}" ] && ! command -v "$PYTHON" > /dev/null; then
        echo "PYTHON is $PYTHON, which is not a program; set it to Python 3.11 or newer" >&2
        exit 1
    fi
    if active_environment_suffices "$extra"; then return; fi
    state=$(
        cat "$root/pyproject.toml" "$root/constraints.txt" <(echo "$root") | cksum | cut -d' ' -f1
    )
    # Written when a set-up is complete, so that one that was interrupted is repeated.
    if [ ! -e "$venv/.installed-$state$extra" ]; then
        if ! command -v "$python" > /dev/null; then
            echo "there is no program $python; set PYTHON to Python 3.11 or newer" >&2
            exit 1
        fi
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "torchtitan needs Python 3.11 or newer; set PYTHON to one" \
                "($python is $("$python" --version 2>&1))" >&2
            exit 1
        fi
        echo "Setting up $venv (first use; takes some minutes)" >&2
        local constraints=$root/constraints.txt
        # An environment made from another environment does not see its packages, so ask it too.
        if "$python" -c "$has_torch" 2>/dev/null &&
            "$python" -m venv --system-site-packages "$venv" &&
            "$venv/bin/python" -c "$has_torch" 2>/dev/null; then
            echo "Using the torch that $python has, a build for CUDA" >&2
            constraints=$venv/constraints-without-torch.txt
            grep -v '^torch==' "$root/constraints.txt" >"$constraints"
        else
            "$python" -m venv "$venv"
            # torch first and pinned, so that no other package's looser request chooses the build.
            "$venv/bin/python" -m pip install --quiet \
                "$(grep '^torch==' "$root/constraints.txt")" >&2
        fi
        # compat: a path that mypy and editors follow, instead of a finder that only a running
        # Python asks.
        "$venv/bin/python" -m pip install --quiet --constraint "$constraints" \
            --config-settings editable_mode=compat --editable "$root${extra:+[$extra]}" >&2
        touch "$venv/.installed-$state" "$venv/.installed-$state$extra"
    fi
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
}
