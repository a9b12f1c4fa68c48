#!/usr/bin/env bash
# Lint, types, then the tests: bash tests/run.sh [pytest arguments]
# Sets up its own environment (see examples/environment.sh). Everything runs even if something before it fails; the exit
# status is zero only if all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package: each would compile it
PY=$(bash examples/environment.sh test) || exit 1

# What starts with this has idle priority: whatever else wants a processor, such as tests that measure time, gets it.
idle=""
chrt --idle 0 true 2>/dev/null && idle="chrt --idle 0"

failed=""
check() {
    local name=$1
    shift
    echo "== $name"
    $idle "$PY" -m "$@" || failed+="${failed:+, }$name"
}

lint() {
    check "ruff check" ruff check .
    check "ruff format" ruff format --check .
    check "mypy" mypy
    echo "== failed: ${failed:-none of these}"
    [ -z "$failed" ]
}

# The tensors are small: threads would wait for each other rather than work.
export OMP_NUM_THREADS=1

# Those that measure time, or wait for seconds. To collect all tests takes 15 s, so only from the files that have some.
time_tests() {
    grep -rlZ --include='test_*.py' 'mark\.alone' tests | sort -z | xargs -0 "$PY" -m pytest -m alone
}

said=$(mktemp -d)
lint >"$said/lint" 2>&1 & # beside the tests; what it finds is printed after them
linting=$!
status=0
if [ $# -gt 0 ]; then
    "$PY" -m pytest "$@"
    status=$?
else
    # Most tests start ranks, which are processes of their own: of those with several ranks, three or four at a time on
    # two processors took 5 or 24 % longer than two, and 14 or 32 % more processor time.
    others() { $idle "$PY" -m pytest -n 2 --dist worksteal -m "not alone"; }
    if [ -n "$idle" ]; then # those that measure time use a quarter of the processors
        time_tests >"$said/time" 2>&1 &
        timing=$!
        others || status=1
        wait "$timing" || status=1
        cat "$said/time"
    else
        others || status=1
        time_tests || status=1
    fi
    # GPUs are kept out of processes that fork others: CUDA, once it is initialised, does not survive that.
    if "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        "$PY" -m pytest -m gpu || status=1
        "$PY" -m pytest -m nccl || status=1
    fi
fi

wait "$linting" || status=1
cat "$said/lint"
rm -r "$said"
exit "$status"
