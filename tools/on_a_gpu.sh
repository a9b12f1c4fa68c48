#!/usr/bin/env bash
# Shows all that one GPU can show, most valuable first. Without a GPU every step runs on its stand-in, in small sizes.
#
#     bash tools/on_a_gpu.sh [DIRECTORY]      # of the results (default: benchmarks/results/NAME OF THE DEVICE)
#
# A step that is done leaves NAME.txt there, what it printed, and maybe NAME.json. One that fails or runs out of time
# leaves NAME.log, and those after it run all the same. Started again, it makes the steps that are not done. The exit
# status is 1 if one of them failed, 130 if it was interrupted.
#
#     STEP_SECONDS   after which a step is ended (default: 120)
#     PY             the Python to run (default: that of examples/environment.sh)
set -uo pipefail

results=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PY=${PY:-$(bash examples/environment.sh test)} || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

ask() { "$PY" -c "import torch; from benchmarks.report.files import RESULTS, machine, machine_name; $1"; }
on_gpu=$(ask 'print("yes" if torch.cuda.is_available() else "")') || exit 1
results=${results:-$(ask "print(RESULTS / machine_name(machine(bool('$on_gpu'))))")} || exit 1
mkdir -p "$results" || exit 1

running=""
trap 'kill $running 2>/dev/null; wait; echo "interrupted: start it again for what is left"; exit 130' INT TERM

failed=""
# step NAME ARGUMENTS...: of Python
step() {
    local name=$1 begun=$SECONDS status=0
    shift
    local log=$results/$name.log
    if [ -e "$results/$name.txt" ]; then
        echo "$name: done before"
        return
    fi
    timeout --kill-after=10 "${STEP_SECONDS:-120}" "$PY" "$@" >"$log" 2>&1 </dev/null &
    running=$! # in the background, so that Ctrl-C ends it
    wait "$running" || status=$?
    running=""
    if [ "$status" -eq 0 ]; then
        mv "$log" "$results/$name.txt"
        echo "$name: done in $((SECONDS - begun)) s"
        return
    fi
    failed+=" $name"
    case $status in
        124) echo "$name: OUT OF TIME after $((SECONDS - begun)) s, see $log" ;;
        *) echo "$name: FAILED with $status after $((SECONDS - begun)) s, see $log" ;;
    esac
}

pytest=(-m pytest -v --durations=10 -p no:cacheprovider)
gpu_files=$(grep -rlE --include='test_*.py' 'mark\.gpu\b' tests | sort)
if [ -n "$on_gpu" ]; then
    host=(--rows 1024 4096 16384)
    check=()
    gpu=(-m gpu)
    nccl=(-m nccl)
    nccl_worlds=(float32-2 float32-4 float32-8 bfloat16-2 bfloat16-4 bfloat16-8) # types and ranks
    each_world=$(printf ' or %s' "${nccl_worlds[@]}")
    other_nccl=("${nccl[@]}" -k "not (${each_world# or })")
    virtual=(--ranks 8 --seq 32768 131072 --heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 --rounds 3)
else
    export OMP_NUM_THREADS=1
    host=(--rows 32 64 128 --ranks 2 --heads 4 --kv-heads 2 --head-dim 16 --dtype float32 --rounds 2)
    check=(--ranks 1)
    gpu=(-m "not gpu" -k "reference and cpu or late_copies and cpu or tried or toy")
    nccl=(-m "not nccl")
    nccl_worlds=()
    other_nccl=("${nccl[@]}")
    virtual=(--ranks 2 --seq 128 256 --heads 4 --kv-heads 2 --head-dim 16 --rounds 2)
fi

# The steps, a line each.
step host -m benchmarks host "${host[@]}" --out "$results/host.json"
step check -m burst_plugin.cli check --quick "${check[@]}" --profile "$results/profile.json" --json "$results/check.json"
for file in $gpu_files; do step "gpu-$(basename "$file" .py)" "${pytest[@]}" "${gpu[@]}" "$file"; done
for world in "${nccl_worlds[@]}"; do step "nccl-$world" "${pytest[@]}" "${nccl[@]}" -k "$world" tests/comm/test_nccl.py; done
step nccl-others "${pytest[@]}" "${other_nccl[@]}" tests/comm/test_nccl.py
step virtual -m benchmarks attention --on virtual "${virtual[@]}" --out "$results/virtual.json"

[ -z "$failed" ] || {
    echo "not done:$failed"
    exit 1
}
