#!/usr/bin/env bash
# Turns text into what Megatron reads, with Megatron's own tool:
#
#     MEGATRON=... TOKENIZER="--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR" \
#         bash prepare_data.sh corpus.jsonl OUT     # one JSON object per line, with the document in "text"
#
# writes OUT.bin and OUT.idx; give pretrain.sh DATA=OUT and the same TOKENIZER. Documents are joined until they fill a
# sequence: for a model to learn from 128 K tokens, documents have to be long, or related ones joined before.
# `--smoke OUT` in place of the arguments makes a small corpus of numbers, for pretrain.sh --smoke.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
run=("$python")
[ $# -eq 2 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" >&2 && exit 2; }
[ -f "${MEGATRON:-}/tools/preprocess_data.py" ] || { echo "prepare_data.sh: MEGATRON='${MEGATRON:-}' is no checkout" >&2 && exit 2; }
corpus=$1 out=$2
mkdir -p "$(dirname "$out")"
if [ "$corpus" = --smoke ]; then
    corpus=$out.jsonl
    run+=(-m burst_plugin.run --framework megatron --cpu) # Megatron's tools import all of Megatron, which wants a GPU
    "$python" - "$corpus" <<'PYTHON'
import json, pathlib, sys

# The bytes of a few modules of the standard library, as the numbers that Megatron's NullTokenizer reads.
library = pathlib.Path(json.__file__).parents[1]
with open(sys.argv[1], "w") as corpus:
    for name in ("argparse.py", "ast.py", "dataclasses.py", "difflib.py", "inspect.py"):
        corpus.write(json.dumps({"text": " ".join(map(str, (library / name).read_bytes()))}) + "\n")
PYTHON
fi
read -r -d '' -a tokenizer <<<"${TOKENIZER:?give the flags of the tokenizer}" || true
PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH} "${run[@]}" "$MEGATRON/tools/preprocess_data.py" --input "$corpus" \
    --output-prefix "$out" --append-eod --workers "${WORKERS:-$(nproc)}" --log-interval 100000 "${tokenizer[@]}"
for suffix in bin idx; do # Megatron adds the name of the field, and how it was cut
    mv "${out}_text_document.$suffix" "$out.$suffix"
done
echo "prepare_data.sh: wrote $out.bin and $out.idx"
