#!/usr/bin/env bash
# Trains a model; sets itself up on first use.
#   MODULE=llama3 CONFIG=debugmodel ./run_train.sh [--section.key value ...]
# MODULE    a model or experiment (`torchtitan ls`), a dotted import path, or a folder
#           (default: llama3)
# CONFIG    a configuration of that module (default: debugmodel)
# NGPU      processes on this host (default: one per GPU, or 1 without any)
# OVERSUBSCRIBE=1
#           allows more than four processes per CPU core (eight on a single core) without GPUs
# LOG_RANK  ranks that print, comma-separated (default: 0)
# MAX_RESTARTS
#           how often a run that crashed, or hung, starts again from its newest checkpoint
#           (default: 0)
# EXTRA     optional packages: transformers, vision (transformers and Pillow), diffusion (also
#           diffusers), quantization (torchao), classify (scikit-learn), sentencepiece, math,
#           mergekit, vllm, wandb, eval, gguf, openenv, verifiers, serve (default: none)
# COMM_MODE fake_backend: train nothing, and say what NGPU processes, any number, would need;
#           docs/dry_run.md
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
#           number of hosts of the run, number of this host (from 0), place where they meet
# ./run_train.sh --help lists every option.
set -euo pipefail
if [[ -n ${CONFIG_FILE:-} ]]; then
    echo "run_train.sh: the environment variable CONFIG_FILE is not read; use" \
        "--config_file $CONFIG_FILE, or for TOML: torchtitan migrate $CONFIG_FILE" >&2
    exit 2
fi
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment "${EXTRA:-}"
export TORCHTITAN_PROGRAM=$0
exec torchtitan train ${MODULE:+--module "$MODULE"} ${CONFIG:+--config "$CONFIG"} "$@"
