"""Run an unmodified training script with burst attention installed:

    torchrun --nproc-per-node 8 -m burst_plugin.run pretrain_gpt.py --context-parallel-size 8 --cp-comm-type burst ...
    deepspeed --num_gpus 8 --module burst_plugin.run train.py --deepspeed_config ds.json ...

Options of the launcher come before the script, the script's own after it.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import multiprocessing
import os
import sys
import types
from pathlib import Path

import torch.distributed as dist

from burst_plugin.frameworks import all_frameworks, framework


def main(arguments: list[str] | None = None) -> None:
    """Install the adapter of the framework that a script uses, then run the script as `python script` would.

    `arguments` are options, the script and its arguments, as on the command line; None for `sys.argv[1:]`. Raises
    SystemExit where there is no such file, or it cannot be told which framework the script uses.
    """
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    script = Path(options.script)
    if not script.is_file():
        raise SystemExit(f"burst_plugin.run: {script} is not a file; give the training script after the options")
    sys.argv = [options.script, *options.passed_on, *options.arguments]
    directory = script.resolve().parent
    chosen = framework(options.framework or framework_of(script, options.arguments))
    sys.path.insert(0, str(directory))
    if options.cpu:
        chosen.prepare_cpu(directory)
    adapter = chosen.install()
    if os.environ.get("RANK", "0") == "0":
        print(adapter, flush=True)
    _execute(script, bare_children=options.cpu)
    if options.cpu:
        _leave()


def framework_of(script: Path, arguments: list[str]) -> str:
    """Return the name of the framework that a script uses, by the first sign that points to one of them alone.

    The signs are the launcher, a checkout around the script, installed frameworks, and words in the script or its
    arguments. With another framework's adapter the script would train without a ring, so SystemExit is raised where
    no sign decides.
    """
    everything = all_frameworks()
    text = " ".join([script.read_text(errors="replace"), *arguments])
    installed = [candidate for candidate in everything if candidate.is_installed()]
    for matches in (
        [candidate for candidate in everything if candidate.is_launching()],
        [candidate for candidate in everything if candidate.has_checkout(script.resolve().parent)],
        installed,
        [candidate for candidate in installed if candidate.is_named_in(text)],
    ):
        if len(matches) == 1:
            return matches[0].name
    if not installed:
        raise SystemExit(f"burst_plugin.run: {_nothing_installed(script)}")
    raise SystemExit(
        f"burst_plugin.run: {' and '.join(candidate.name for candidate in installed)} are installed, and {script} "
        "does not say which of them it uses; put "
        f"{' or '.join(f'--framework {candidate.name}' for candidate in everything)} before it"
    )


def _nothing_installed(script: Path) -> str:
    """Return a text that names the missing frameworks, and the ways to add one."""
    everything = all_frameworks()
    with_checkout = [candidate for candidate in everything if candidate.checkout]
    missing = "".join(f", and no directory `{candidate.name}` lies beside {script}" for candidate in with_checkout)
    ways = [
        "install one",
        *(f"give the script inside its {candidate.checkout} checkout" for candidate in with_checkout),
    ]
    return (
        f"neither {' nor '.join(candidate.distribution for candidate in everything)} is installed here{missing}: "
        f"{', or '.join(ways)}"
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the launcher, the script, and the script's own arguments.

    Raises SystemExit for options that the launcher does not have.
    """
    everything = all_frameworks()
    parser = argparse.ArgumentParser(
        prog="python -m burst_plugin.run",
        description=f"Run a training script of {' or '.join(candidate.title for candidate in everything)} with burst "
        "attention installed.",
        epilog=f"Switch it on with {', or with '.join(candidate.switch for candidate in everything)}.",
    )
    parser.add_argument(
        "--framework",
        choices=[candidate.name for candidate in everything],
        help="the framework that the script uses (default: what the launcher, the script or the environment says)",
    )
    for option in [option for candidate in everything for option in candidate.launcher_options]:
        parser.add_argument(
            option,
            dest="passed_on",
            action="append",
            type=f"{option}={{}}".format,
            help=argparse.SUPPRESS,
        )
    parser.add_argument("--cpu", action="store_true", help="run on CPUs with gloo (slow; to try things out)")
    parser.add_argument("script", metavar="SCRIPT", help="the training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(passed_on=[])
    return parser.parse_args(arguments)


def _execute(script: Path, *, bare_children: bool) -> None:
    """Run the script as `__main__`, in a module of its own that pickling can find.

    Processes that it spawns import it again, unless `bare_children`: they do not redirect CUDA then.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    if bare_children:
        module.__spec__ = importlib.machinery.ModuleSpec("__main__", None)  # multiprocessing takes it for imported
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)


def _leave() -> None:
    """Wait for all ranks, then exit at once: gloo's threads sometimes abort an orderly exit."""
    if dist.is_initialized():
        dist.barrier()
    for child in multiprocessing.active_children():  # such as writers of checkpoints
        child.terminate()
        child.join(10)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
