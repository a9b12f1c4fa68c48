"""What a run of this recipe needs: memory per GPU and time per step, from Megatron's flags alone.

    python examples/pretrain_7b/cost_model.py                     # the table of README.md
    python examples/pretrain_7b/cost_model.py --gpu-gib 141 --show llama2_7b 1m 1

It reads flags.env. README.md has the formulas, with the same names; every constant of the machine is an option here.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

MODELS = ("llama2_7b", "llama3_8b")
LENGTHS = ("128k", "1m")
NODES = (1, 4, 8)
GPUS_PER_NODE = 8
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; rates are what a GPU reaches, in one direction."""

    gpu_gib: float = 80.0
    peak_flops: float = 989e12  # of an H100, dense bf16
    matmul_share: float = 0.55  # of the peak, in linear layers
    attention_share: float = 0.45  # of the peak, in attention kernels
    intra_bytes_per_s: float = 350e9  # NVLink 4
    inter_bytes_per_s: float = 40e9  # one 400 Gbit/s NIC per GPU


@dataclass(frozen=True)
class Run:
    """A model and how it is cut, as Megatron's flags say."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    tokens: int
    batch: int
    tp: int
    cp: int
    pp: int
    inner: int
    """Context-parallel ranks in a node."""
    recompute: str
    """full, mlp (selective) or none."""
    gpus: int

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def local_tokens(self) -> int:
        """Tokens of a sequence on one context-parallel rank; tensor-parallel ranks share them."""
        return self.tokens // self.cp

    @property
    def kv_share(self) -> float:
        return self.groups / self.heads

    @property
    def parameters(self) -> int:
        """All of the model's, embeddings and output layer apart."""
        attention = self.hidden * self.hidden * (2 + 2 * self.kv_share)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return int(self.layers * layer + 2 * self.vocab * self.hidden + self.hidden)


# ------------------------------------------------------------------------------------------------ flags.env -> Run


def read_flags(path: Path) -> dict[str, list[str]]:
    """Variables of a file of shell assignments, each split into words; $NAME is one that came before."""
    variables: dict[str, list[str]] = {}
    for assignment in shlex.split(path.read_text(), comments=True):
        name, value = assignment.split("=", 1)
        words = [variables[word[1:]] if word.startswith("$") else [word] for word in value.split()]
        variables[name] = [word for some in words for word in some]
    return variables


def run_of(variables: dict[str, list[str]], model: str, length: str, nodes: int) -> Run:
    """The run that pretrain.sh starts for MODEL, TOKENS and NODES."""
    flags = [
        *variables["TRAINING"],
        *variables[model.upper()],
        *variables[f"LENGTH_{length.upper()}"],
        *variables[f"LAYOUT_{model.upper()}_{length.upper()}_{nodes}"],
    ]

    def value(name: str, default: int = 1) -> int:
        return int(flags[len(flags) - flags[::-1].index(name)]) if name in flags else default

    full = "full" if "full" in flags else "mlp" if "mlp" in flags else "none"
    cp, heads = value("--context-parallel-size"), value("--num-attention-heads")
    tp = value("--tensor-model-parallel-size")
    return Run(
        layers=value("--num-layers"),
        hidden=value("--hidden-size"),
        ffn=value("--ffn-hidden-size"),
        heads=heads,
        groups=value("--num-query-groups", heads),
        vocab=value("--vocab-size"),
        tokens=value("--seq-length"),
        batch=value("--global-batch-size"),
        tp=tp,
        cp=cp,
        pp=value("--pipeline-model-parallel-size"),
        inner=value("--hierarchical-context-parallel-sizes", min(cp, GPUS_PER_NODE // tp)),
        recompute=full,
        gpus=nodes * GPUS_PER_NODE,
    )


# ---------------------------------------------------------------------------------------------------------- memory


def memory_bytes(run: Run) -> dict[str, float]:
    """Bytes per GPU on the fullest pipeline stage, by what they are for."""
    own = run.parameters / (run.tp * run.pp)
    token_share = run.local_tokens / run.tp  # sequence parallelism cuts what is not attention once more
    kept = {"full": 1.0, "mlp": 6.0 + 2 * run.kv_share, "none": 6.0 + 2 * run.kv_share + 4 * run.ffn / run.hidden}
    stages_in_flight = min(run.pp, run.batch // run.dp)  # the first stage keeps as many microbatches
    layers = run.layers / run.pp * stages_in_flight
    one_layer = (6.0 + 2 * run.kv_share + 4 * run.ffn / run.hidden) * run.hidden * BF16
    return {
        "weights and gradients": own * (BF16 + FP32),
        "optimizer": own * 3 * FP32 / (run.dp * run.cp),
        "kept activations": kept[run.recompute] * run.hidden * BF16 * token_share * layers,
        "layer at work": 2 * one_layer * token_share,
        "logits": run.local_tokens * run.vocab / run.tp * (BF16 + 2 * FP32),
        "ring buffers": _ring_buffers(run),
    }


def gib_per_gpu(run: Run) -> float:
    """All of it."""
    return sum(memory_bytes(run).values()) / 2**30


def fits(run: Run, machine: Machine) -> str:
    """What to say behind a size."""
    return " (does not fit)" if gib_per_gpu(run) > machine.gpu_gib else ""


def _ring_buffers(run: Run) -> float:
    """Backward passes need most: blocks of what travels, and its float32 sums (docs/internals.md, Memory)."""
    if run.cp == 1:
        return 0.0
    operands, sums = _travelling(run)
    blocks, of_sums = (5, 6) if 1 < run.inner < run.cp else (2, 3)
    return run.local_tokens * (blocks * operands + of_sums * sums)


def _travelling(run: Run) -> tuple[float, float]:
    """Bytes per token and hop in a backward pass: of operands, and of float32 sums. The side with fewer travels."""
    dim, heads, groups = run.hidden // run.heads, run.heads / run.tp, run.groups / run.tp
    kv = (groups * 2 * dim * BF16, groups * 2 * dim * FP32)
    q = (heads * 2 * dim * BF16 + 2 * heads * FP32, heads * dim * FP32)
    return min(kv, q, key=sum)


# ------------------------------------------------------------------------------------------------------------ time


def step_seconds(run: Run, machine: Machine) -> dict[str, float]:
    """Seconds per optimizer step, by what they are spent on; what is hidden behind other work is not counted."""
    microbatches = run.batch // run.dp
    layers, share = run.layers / run.pp, run.tp * run.cp
    dense, mlp, attention = _flops(run)
    again = {"full": dense, "mlp": mlp, "none": 0.0}[run.recompute]
    matmul_s = (3 * dense + again) / share / (machine.peak_flops * machine.matmul_share) * layers
    output_s = 6 * run.tokens * run.vocab * run.hidden / share / (machine.peak_flops * machine.matmul_share)
    visit_s = attention / share / (machine.peak_flops * machine.attention_share)  # of all visits of a forward
    forwards = 2 if run.recompute == "full" else 1
    ring_s = forwards * max(0.0, _ring_seconds(run, machine, *_forward_bytes(run)) - visit_s)
    ring_s += max(0.0, _ring_seconds(run, machine, *_travelling(run)) - 2.5 * visit_s)
    tensor_s = (10 + 4 * (forwards - 1)) * _tensor_parallel_seconds(run, machine)
    micro = {
        "linear layers": matmul_s + output_s / run.pp,
        "attention": layers * visit_s * (forwards + 2.5),
        "ring, not hidden": layers * ring_s,
        "tensor parallelism": layers * tensor_s,
    }
    spent = {name: seconds * microbatches for name, seconds in micro.items()}
    spent["pipeline bubble"] = (run.pp - 1) * sum(micro.values())
    spent["gradients and weights"] = max(0.0, _data_parallel_seconds(run, machine) - sum(micro.values()) * 2 / 3)
    return spent


def _flops(run: Run) -> tuple[float, float, float]:
    """Of one layer's forward on one sequence: linear layers, those of them in the MLP, causal attention."""
    mlp = 2 * run.tokens * 3 * run.hidden * run.ffn
    projections = 2 * run.tokens * run.hidden * run.hidden * (2 + 2 * run.kv_share)
    return mlp + projections, mlp, 2 * float(run.tokens) ** 2 * run.hidden


def _forward_bytes(run: Run) -> tuple[float, float]:
    return run.groups / run.tp * 2 * (run.hidden // run.heads) * BF16, 0.0


def _ring_seconds(run: Run, machine: Machine, operands: float, sums: float) -> float:
    """Time on the links of one pass around the ring, flat inside a node or in two levels."""
    block_bytes = run.local_tokens * (operands + sums)
    nodes = run.cp // run.inner
    intra_s = nodes * (run.inner - 1) * block_bytes / machine.intra_bytes_per_s
    return max(intra_s, (nodes - 1) * block_bytes / machine.inter_bytes_per_s)


def _tensor_parallel_seconds(run: Run, machine: Machine) -> float:
    """One all-gather or reduce-scatter of a layer's activations."""
    return run.local_tokens * run.hidden * BF16 * (run.tp - 1) / run.tp / machine.intra_bytes_per_s


def _data_parallel_seconds(run: Run, machine: Machine) -> float:
    """Reduce-scatter of float32 gradients and all-gather of bf16 weights, over data and context parallelism."""
    ranks = run.dp * run.cp
    rate = machine.inter_bytes_per_s if run.gpus > GPUS_PER_NODE else machine.intra_bytes_per_s
    return run.parameters / (run.tp * run.pp) * (FP32 + BF16) * (ranks - 1) / ranks / rate


# ----------------------------------------------------------------------------------------------------------- report


def table(machine: Machine, variables: dict[str, list[str]]) -> str:
    """All runs of the recipe, as a table in Markdown."""
    lines = [
        "| model | tokens | nodes | TP × CP × PP × DP | CP: nodes × ranks | recompute | GiB per GPU | s per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for length in LENGTHS:
            for nodes in NODES:
                run = run_of(variables, model, length, nodes)
                seconds = sum(step_seconds(run, machine).values())
                size = f"{gib_per_gpu(run):.0f}" + fits(run, machine)
                cut = f"{run.tp} × {run.cp} × {run.pp} × {run.dp}"
                levels = f"{run.cp // run.inner} × {run.inner}"
                cells = (model, length, nodes, cut, levels, run.recompute, size, f"{seconds:.0f}")
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def details(run: Run, machine: Machine) -> str:
    """Where the memory and the time of one run go."""
    lines = [f"{run.parameters / 1e9:.2f} G parameters"]
    for title, parts, unit in (
        ("GiB per GPU", {name: size / 2**30 for name, size in memory_bytes(run).items()}, "GiB"),
        ("seconds per step", step_seconds(run, machine), "s"),
    ):
        lines += ["", title, *(f"  {name:24}{value:8.1f} {unit}" for name, value in parts.items())]
        lines.append(
            f"  {'together':24}{sum(parts.values()):8.1f} {unit}" + (fits(run, machine) if unit == "GiB" else "")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory per GPU and time per step of this recipe.")
    parser.add_argument("--flags", type=Path, default=Path(__file__).with_name("flags.env"), help="where flags are")
    parser.add_argument("--show", nargs=3, metavar=("MODEL", "TOKENS", "NODES"), help="one run, part by part")
    for field in fields(Machine):
        parser.add_argument("--" + re.sub("_", "-", field.name), type=float, default=field.default)
    options = parser.parse_args()
    machine = Machine(**{field.name: getattr(options, field.name) for field in fields(Machine)})
    variables = read_flags(options.flags)
    if options.show:
        model, length, nodes = options.show
        print(details(run_of(variables, model, length, int(nodes)), machine))
    else:
        print(table(machine, variables))


if __name__ == "__main__":
    main()
