#!/usr/bin/env bash
# A tiny GPT in Megatron-LM, on sequences that two ranks share:
#
#   bash train.sh /path/to/Megatron-LM
#
# What a launch of your own needs: `-m burst_plugin.run` before the script, the flags of flags.txt, and
# --context-parallel-size, the number of ranks that share a sequence.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
MEGATRON=${1:?give the path of a checkout of Megatron-LM}

python -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)' && CPU=() || CPU=(--cpu)
SMALL="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 512
  --max-position-embeddings 512 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
RUN="--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --micro-batch-size 1 --global-batch-size 1
  --train-iters 5 --lr 1e-3 --log-interval 1 --eval-iters 0 --eval-interval 1000 --hidden-dropout 0"
if [ ${#CPU[@]} -gt 0 ]; then
    RUN+=" --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion
      --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --num-workers 0"
else
    RUN+=" --bf16"
fi

export CUDA_DEVICE_MAX_CONNECTIONS=1
# shellcheck disable=SC2046,SC2086
python -m torch.distributed.run --standalone --nproc-per-node 2 -m burst_plugin.run "${CPU[@]}" \
    "$MEGATRON/pretrain_gpt.py" --context-parallel-size 2 $(cat flags.txt) $SMALL $RUN
