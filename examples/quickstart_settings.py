"""What can be set on the command line of the quickstart, and whether it fits together."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Settings", "parse"]


@dataclass(frozen=True)
class Settings:
    """One quickstart. Ranks get it as a JSON file."""

    steps: int
    seq_length: int
    ranks: int
    nodes: int
    layers: int
    pattern: str
    hidden: int
    heads: int
    kv_heads: int
    learning_rate: float
    seed: int
    backward: str
    data: str
    out: str
    reference: bool
    device: str
    """cuda or cpu: where the ranks compute. NCCL joins them on cuda, gloo on cpu."""

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def model(self) -> str:
        """What is trained, in words."""
        return "a hybrid model" if self.pattern else "a GPT"

    @property
    def directory(self) -> Path:
        """Where everything is written."""
        return Path(self.out)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))


def parse(arguments: list[str] | None = None) -> Settings:
    """The settings on the command line; ends the program with a message if they do not fit together."""
    parser = _parser()
    given = parser.parse_args(arguments, argparse.Namespace(nodes=0, data="", no_reference=False, pattern=""))
    given.layers = len(given.pattern) or given.layers
    given.nodes = given.nodes or (2 if given.ranks % 2 == 0 else 1)
    problem = _problem(given)
    if problem:
        parser.error(problem)
    options = vars(given)
    options["reference"] = not options.pop("no_reference")
    options["out"] = str(Path(given.out).resolve())
    options["data"] = str(Path(given.data).resolve()) if given.data else ""
    return Settings(**options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        usage="bash examples/quickstart.sh [options]",
        description="Train a small GPT with Megatron-core and burst attention on a long sequence, cut over several "
        "ranks; then train the same model on one rank and compare. Uses GPUs if there is one for every rank, "
        "else the CPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--steps", type=int, metavar="N", default=16, help="optimizer steps")
    run.add_argument("--seq-length", type=int, metavar="N", default=4096, help="tokens in the sequence of one step")
    run.add_argument("--ranks", type=int, metavar="N", default=4, help="processes that share each sequence")
    nodes_help = (
        "nodes that the ranks count as, for the two-level ring (default: 2 if that divides the ranks, else 1)"
    )
    run.add_argument("--nodes", type=int, metavar="N", default=argparse.SUPPRESS, help=nodes_help)
    run.add_argument(
        "--backward",
        choices=("auto", "q", "kv"),
        default="auto",
        help="which side travels the ring in backward passes; auto takes the one with fewer bytes",
    )
    no_help = "leave out the run on one rank"
    run.add_argument("--no-reference", action="store_true", default=argparse.SUPPRESS, help=no_help)
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", type=int, metavar="N", default=4, help="layers of the Transformer")
    pattern_help = (
        "a hybrid model in place of the GPT, by Megatron's letters: M is a Mamba-2 layer, * attention, - an MLP; "
        "MM-*M- is a small Nemotron-H (on GPUs it needs mamba-ssm and Transformer Engine)"
    )
    model.add_argument("--pattern", metavar="LETTERS", default=argparse.SUPPRESS, help=pattern_help)
    model.add_argument("--hidden", type=int, metavar="N", default=256, help="width of the model")
    model.add_argument("--heads", type=int, metavar="N", default=8, help="query heads")
    model.add_argument(
        "--kv-heads", type=int, metavar="N", default=4, help="key/value heads (grouped-query attention)"
    )
    model.add_argument("--learning-rate", type=float, metavar="X", default=2e-3, help="of Adam, constant")
    model.add_argument("--seed", type=int, metavar="N", default=1234, help="of weights and of the order of the data")
    files = parser.add_argument_group("files and devices")
    data_help = "a text file to train on (default: the sources of Python's standard library)"
    files.add_argument("--data", metavar="FILE", default=argparse.SUPPRESS, help=data_help)
    out_help = "directory for data, logs, results and the picture"
    files.add_argument("--out", metavar="DIR", default="quickstart-out", help=out_help)
    device_help = "where to compute; auto takes GPUs if there is one for every rank"
    files.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device_help)
    return parser


def _problem(given: argparse.Namespace) -> str:
    """What is wrong with the options together; empty if nothing is."""
    least = dict.fromkeys(("steps", "seq_length", "nodes", "layers", "hidden", "heads", "kv_heads"), 1)
    for name, minimum in {**least, "ranks": 2}.items():
        if getattr(given, name) < minimum:
            return f"--{name.replace('_', '-')}: got {getattr(given, name)}, expected at least {minimum}"
    if given.ranks % given.nodes:
        return f"--ranks {given.ranks} does not divide evenly over --nodes {given.nodes}: change one of them"
    chunks = 2 * given.ranks
    if given.seq_length % chunks:
        suggestion = -(-given.seq_length // chunks) * chunks
        return (
            f"--seq-length: got {given.seq_length}, expected a multiple of 2 x ranks = {chunks}, because "
            f"Megatron gives every rank two chunks; try {suggestion}"
        )
    if given.heads % given.kv_heads:
        return f"--heads {given.heads} must be a multiple of --kv-heads {given.kv_heads}"
    if given.hidden % (2 * given.heads):
        return f"--hidden {given.hidden} must be a multiple of 2 x --heads = {2 * given.heads} (for RoPE)"
    if given.pattern and ("*" not in given.pattern or set(given.pattern) - set("M*-")):
        return f"--pattern {given.pattern}: expected letters M, * and -, of which * at least once; try MM-*M-"
    if given.data and not Path(given.data).is_file():
        return f"--data: {given.data} is not a file"
    if given.data and Path(given.data).stat().st_size <= given.seq_length:
        size = Path(given.data).stat().st_size
        return f"--data: got a text of {size:,} bytes, expected more than --seq-length {given.seq_length:,}"
    return ""
