#!/usr/bin/env bash
# Trains a small GPT with Megatron-core and burst attention: 4 ranks as 2 nodes x 2, on a sequence cut in four.
# Then trains the same model on one rank, and compares. Needs Python 3.10 or newer, and no GPU.
#
#     bash examples/quickstart.sh             # some minutes on two cores, after the first run has installed things
#     bash examples/quickstart.sh --pattern MM-*M-    # a hybrid model: Mamba-2, attention and MLPs
#     bash examples/quickstart.sh --help      # all options
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PY=$(bash "$here/environment.sh" megatron,plot)
exec "$PY" "$here/quickstart.py" "$@"
