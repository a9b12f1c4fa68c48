#!/usr/bin/env bash
# Pretrains a 7B or 8B model on long sequences with Megatron-LM and burst attention. README.md explains all of it.
#
#     MEGATRON=... DATA=... TOKENIZER="..." bash pretrain.sh [--print | --smoke] [more flags of Megatron's]
#
#     --print    print the command instead of running it; it names DATA and TOKENIZER where these are not set
#     --smoke    the same script and flags with a tiny model on CPUs, on data made here: about a minute
#
# Environment (and what it is without):
#     MEGATRON   a Megatron-LM checkout: core_v0.16.1, 0.17.1, 0.18.2, 0.19.0 or main
#     DATA       what prepare_data.sh wrote, without .bin and .idx
#     TOKENIZER  Megatron's flags of the tokenizer, e.g. "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
#     OUT        where checkpoints, logs and caches go (pretrain-out/MODEL-TOKENS); a run continues from what it finds
#                there. On several nodes MEGATRON, DATA and OUT are on a file system that all of them see
#     MODEL      llama2_7b or llama3_8b (llama2_7b)
#     TOKENS     length of a sequence: 128k, 1m, or 4m on 4 nodes (128k)
#     NODES      of 8 GPUs: 1, 4 or 8 (1); `burst plan` finds layouts for other numbers, to be added to flags.env
#     ITERS      optimizer steps (5000)
#     LAUNCHER   torchrun: start this on every node, with NODE_RANK and MASTER_ADDR; slurm: by srun, see slurm.sbatch;
#                deepspeed: start this once, with HOSTFILE if there are several nodes (torchrun)
#     CP, RANKS  only for --smoke: context-parallel size 1, 2 or 4 and processes (4, and as many as CP)
#     PYTHON     (python3)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/flags.env"

die() {
    echo "pretrain.sh: $*" >&2
    exit 2
}

mode=run
case ${1:-} in
--print | --smoke) mode=${1#--} && shift ;;
-h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;;
[!-]*) die "$1 is not known; the first word is --print, --smoke or a flag of Megatron's" ;;
esac
for word in "$@"; do # no run starts for a slip in these two, which begin like no flag of Megatron's
    case $word in
    --print | --smoke) die "$word comes first, before flags of Megatron's" ;;
    -[Ss]m* | --[Ss]m* | --som* | -[Pp]r[in]* | --[Pp]r[in]* | --pirnt) die "$word is not known; did you mean --print or --smoke?" ;;
    esac
done

python=${PYTHON:-python3} model=${MODEL:-llama2_7b} tokens=${TOKENS:-128k} nodes=${NODES:-1}
gpus_per_node=8
if [ "$mode" = print ]; then # to look at a command, neither has to be there
    DATA=${DATA:-DATA} TOKENIZER=${TOKENIZER:---tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER}
fi
[ -f "${MEGATRON:-}/pretrain_gpt.py" ] || die "MEGATRON='${MEGATRON:-}' is no Megatron-LM checkout: it has no pretrain_gpt.py"
case $model in llama2_7b | llama3_8b) ;; *) die "MODEL=$model is not known; use llama2_7b or llama3_8b" ;; esac
if [ "$mode" = smoke ]; then
    out=${OUT:-$PWD/pretrain-out/smoke}
    [ -n "${OUT:-}" ] || rm -rf "$out/checkpoints" # else there would be nothing left to train
else
    out=${OUT:-$PWD/pretrain-out/$model-$tokens}
fi
case $out in /*) ;; *) out=$PWD/$out ;; esac

# ------------------------------------------------------------------------------------------------------------- the data

if [ "$mode" = smoke ]; then
    export CUDA_VISIBLE_DEVICES= # also where there are GPUs
    TOKENIZER="--tokenizer-type NullTokenizer --vocab-size 256" DATA=$out/smoke_data
    [ -e "$DATA.idx" ] || PYTHON=$python MEGATRON=$MEGATRON TOKENIZER=$TOKENIZER bash "$here/prepare_data.sh" --smoke "$DATA"
fi
[ -n "${DATA:-}" ] || die "DATA is not set; give what prepare_data.sh wrote"
[ -n "${TOKENIZER:-}" ] || die "TOKENIZER is not set; give Megatron's flags, as to prepare_data.sh"
[ "$mode" = print ] || [ -e "$DATA.idx" ] || die "DATA=$DATA: there is no $DATA.idx; make it with prepare_data.sh"

# ------------------------------------------------------------------------------------------------------------ the flags

upper() { tr '[:lower:]' '[:upper:]' <<<"$1"; }
lookup() { # lookup NAME "how to choose another"
    [ -n "${!1:-}" ] || die "flags.env has no $1; $2"
    printf '%s ' "${!1}"
}
flags="$TRAINING $(lookup "$(upper "$model")" "change MODEL")"
if [ "$mode" = smoke ]; then
    cp=${CP:-4} ranks=${RANKS:-${CP:-4}} nodes=1
    flags+="$(lookup "SMOKE_$(upper "$model")" "change MODEL") $SMOKE $CPU $(lookup "LAYOUT_SMOKE_$cp" "use CP=1, 2 or 4")"
    iters=${ITERS:-20} gpus_per_node=$ranks
else
    flags+="$(lookup "LENGTH_$(upper "$tokens")" "use TOKENS=128k, 1m or 4m") $GPU "
    batch=${flags##*--global-batch-size } batch=${batch%%[!0-9]*}
    flags+="$(lookup "LAYOUT_$(upper "${model}_${tokens}_$nodes")" "use NODES=1, 4 or 8, or add a layout to flags.env, which burst plan finds:
    burst plan --model $model --seq $tokens --gpus $((gpus_per_node * nodes)) --batch $batch --emit plan")"
    iters=${ITERS:-5000}
fi
# The tokenizer comes after the model, since its vocabulary counts.
read -r -d '' -a words <<<"$flags $TOKENIZER" || true
words+=(--data-path "$DATA" --data-cache-path "$out/cache" --train-iters "$iters")
words+=(--save "$out/checkpoints" --load "$out/checkpoints")
[ "$mode" = smoke ] || words+=(--tensorboard-dir "$out/tensorboard")
if [ "$mode" = run ] && ! "$python" -c 'import torch, fused_weight_gradient_mlp_cuda' >/dev/null 2>&1; then
    echo "pretrain.sh: Apex' fused_weight_gradient_mlp_cuda is not installed: --no-gradient-accumulation-fusion" >&2
    words+=(--no-gradient-accumulation-fusion)
fi

# --------------------------------------------------------------------------------------------------------- the launcher

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
torchrun=("$python" -m torch.distributed.run --nproc-per-node "$gpus_per_node")
module=(burst_plugin.run --framework megatron)
launcher=${LAUNCHER:-torchrun}
[ "$mode" != smoke ] || launcher=smoke
case $launcher in
smoke) launch=("${torchrun[@]}" --standalone -m "${module[@]}" --cpu) ;;
torchrun)
    if [ "$nodes" != 1 ] && [ "$mode" != print ]; then # each node would wait for itself
        [ -n "${MASTER_ADDR:-}" ] || die "NODES=$nodes, but MASTER_ADDR is not set; give the name of the first node"
        case ${NODE_RANK:-} in '' | *[!0-9]*) die "NODES=$nodes, but NODE_RANK='${NODE_RANK:-}'; use 0 on the first node" ;; esac
        [ "$NODE_RANK" -lt "$nodes" ] || die "NODE_RANK=$NODE_RANK of NODES=$nodes; use 0 to $((nodes - 1))"
    fi
    launch=("${torchrun[@]}" --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}")
    launch+=(--master-port "${MASTER_PORT:-29500}" -m "${module[@]}")
    ;;
slurm) # one task per node
    head=${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:?LAUNCHER=slurm is for srun: see slurm.sbatch}" | head -n 1)}
    launch=("${torchrun[@]}" --nnodes "${SLURM_NNODES:-$nodes}" --rdzv-id "${SLURM_JOB_ID:-0}" --rdzv-backend c10d)
    launch+=(--rdzv-endpoint "$head:${MASTER_PORT:-29500}" -m "${module[@]}")
    ;;
deepspeed)
    launch=("$python" -m deepspeed.launcher.runner --no_local_rank --num_gpus "$gpus_per_node")
    if [ -n "${HOSTFILE:-}" ]; then
        launch+=(--hostfile "$HOSTFILE" --num_nodes "$nodes")
    elif [ "$nodes" != 1 ]; then
        die "NODES=$nodes, but HOSTFILE is not set; give DeepSpeed's hostfile"
    fi
    launch+=(--master_port "${MASTER_PORT:-29500}" --module "${module[@]}")
    node_env=$out/deepspeed.env # what DeepSpeed gives to other nodes, beside PYTHON* and NCCL*
    ;;
*) die "LAUNCHER=$launcher is not known; use torchrun, slurm or deepspeed" ;;
esac

command=("${launch[@]}" "$MEGATRON/pretrain_gpt.py" "${words[@]}" "$@")
if [ "$mode" = print ]; then
    printf '%s\n' "$(printf '%q ' "${command[@]}" | sed 's/ $//')"
else
    mkdir -p "$out"
    echo "pretrain.sh: checkpoints, logs and caches: $out"
    export PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH} # burst_plugin, if it is not installed
    if [ -n "${node_env:-}" ]; then
        cat "${DS_ENV_FILE:-$HOME/.deepspeed_env}" 2>/dev/null >"$node_env.new" || true
        for name in CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS PYTORCH_ALLOC_CONF; do
            printf '%s=%s\n' "$name" "${!name}"
        done >>"$node_env.new"
        mv "$node_env.new" "$node_env"
        export DS_ENV_FILE=$node_env
    fi
    exec "${command[@]}"
fi
