#!/usr/bin/env bash
# Trains with DeepSpeed ZeRO-3 and burst attention on 4 ranks, then without it on one, and compares. Needs Python 3.10
# or newer, and no GPU.
#
#     bash examples/deepspeed/run.sh                # the DeepSpeed script, train.py
#     bash examples/deepspeed/run.sh trainer.py     # the same with Hugging Face Trainer
#     bash examples/deepspeed/run.sh train.py --model qwen3_5     # a hybrid model
#     bash examples/deepspeed/run.sh images.py      # a model that reads numbers off images
#     bash examples/deepspeed/run.sh train.py --steps 20 --seq-length 4096
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PY=$(bash "$here/../environment.sh" huggingface)
script=${1:-train.py}
shift || true
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
gpus=$("$PY" -c 'import torch; print(torch.cuda.device_count() * torch.cuda.is_available())')
if [ "$gpus" -lt 4 ]; then cpu=--cpu; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore DS_LOG_LEVEL=error

run() {
    local ranks=$1
    shift
    "$PY" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        -m burst_plugin.run --framework deepspeed ${cpu:+$cpu} "$here/$script" "$@"
}

run 4 --out "$out/ring.json" "$@"
run 1 --off --out "$out/one.json" "$@"
"$PY" "$here/compare.py" "$out/ring.json" "$out/one.json"
