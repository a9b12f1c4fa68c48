"""The command line of the benchmarks: `bash benchmarks/bench COMMAND ...`, or `python -m benchmarks COMMAND ...`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from benchmarks import RefusedError

# Each is a module of this package with `add_arguments(parser)` and `run(options) -> int`, imported when it is called.
COMMANDS = {
    "cluster": ("cluster", "an emulated cluster of network namespaces: rings and other libraries against a bound"),
    "latents": ("latents", "multi-head latent attention, on emulated clusters: latents, expanded keys and values"),
    "groups": ("groups", "documents on one ring, and on a group for each length, on emulated clusters"),
    "recurrent": ("recurrent", "layers that carry a state, on emulated clusters: states, heads, contiguous tokens"),
    "auto": ("auto", "clusters drawn at random: what a profile has the planner choose, against all configurations"),
    "attention": ("attention", "forward and backward of the distributed attention: rate, share of a kernel, memory"),
    "overhead": ("overhead", "what the package's own Python costs per visit"),
    "host": ("host", "what the host takes for a rank's step beside the kernel, at the sizes of a GPU"),
    "train": ("train", "tokens/s, MFU and memory of the training examples, with and without context parallelism"),
    "draw": ("report.pictures", "pictures of the results"),
    "table": ("report.tables", "the tables of the results, in benchmarks/results/README.md"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 2 for what cannot be done here, 130 if it was interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that processes and files are cleaned up
    parser = argparse.ArgumentParser(prog="bench", description="Measurements of burst_plugin and other libraries.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    called = next((word for word in arguments if not word.startswith("-")), "")
    for name, (path, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if name == called:
            module = importlib.import_module(f"benchmarks.{path}")
            command.description = (module.__doc__ or summary).split("\n\n")[0]
            module.add_arguments(command)
            command.set_defaults(run_command=module.run)
    try:
        options = parser.parse_args(arguments)
        run = vars(options).pop("run_command")
        return int(run(options))
    except RefusedError as refusal:
        print(f"bench: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: stopped; processes have been ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
