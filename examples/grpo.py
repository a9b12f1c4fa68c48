"""GRPO on a tiny Llama over four ranks, every step with folded rollouts and without: the same losses, in less time.

    torchrun --nproc-per-node 4 examples/grpo.py

A token of an answer is right if it is the one after the token before it, which can be checked. Every rank has a
prompt of its own and draws eight answers to it. Then the loss and its gradients are computed twice: folded
over the ring of all ranks, in which each prompt is there once, and unfolded, every rank by itself, as is usual. The
folded ones train the model. At the end there is a picture, grpo.png. `--smoke` shows in seconds that everything runs.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from burst_plugin import ContextParallel
from burst_plugin.huggingface import prepare, rollout_log_probs

VOCABULARY, ROLLOUTS, UPDATES, CLIP = 12, 8, 2, 0.2
WAYS = ("folded", "unfolded")


def tiny_llama(length: int) -> PreTrainedModel:
    """Return a model, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@torch.no_grad()
def draw_rollouts(model: PreTrainedModel, prompt: int, answer: int) -> Tensor:
    """Return the rollouts of one new prompt, [8, prompt + answer]."""
    prompts = torch.randint(VOCABULARY, (1, prompt)).expand(ROLLOUTS, -1)
    lengths = {"max_new_tokens": answer, "min_new_tokens": answer, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(prompts)
    return model.eval().generate(prompts, attention_mask=mask, do_sample=True, top_k=0, **lengths)


def rewards_of(rollouts: Tensor, answer: int) -> Tensor:
    """Return the share of each answer's tokens that follow on the token before, [8]."""
    follows = rollouts[:, 1:] == (rollouts[:, :-1] + 1) % VOCABULARY
    return follows[:, -answer:].float().mean(1)


def loss_of(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Return GRPO's loss of this rank's answers, of log-probabilities [8, answer]."""
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()


def folded(model: PreTrainedModel, rollouts: Tensor, answer: int, cp: ContextParallel) -> tuple[Tensor, int]:
    """Return the log-probabilities of answers, [8, answer], and the tokens that all ranks compute."""
    found = rollout_log_probs(model, rollouts, cp, own=True)  # the ring folds those of all its ranks
    return torch.stack(found.log_probs)[:, -answer:], found.tokens


def unfolded(model: PreTrainedModel, rollouts: Tensor, answer: int) -> tuple[Tensor, int]:
    """Return the same, each answer after a prompt of its own."""
    logits = model(rollouts, use_cache=False, logits_to_keep=answer + 1).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(2, rollouts[:, -answer:, None])[..., 0]
    return log_probs, rollouts.numel() * dist.get_world_size()


def gradients(
    model: PreTrainedModel, log_probs: Callable[[], tuple[Tensor, int]], old: Tensor | None, advantages: Tensor
) -> dict[str, Any]:
    """Return what one way to compute an update gives, gradients averaged over ranks, and the seconds it takes."""
    model.train().zero_grad()
    dist.barrier()
    began = time.perf_counter()
    found, tokens = log_probs()
    loss = loss_of(found, found.detach() if old is None else old, advantages)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    seconds = time.perf_counter() - began
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return {"loss": float(mean), "seconds": seconds, "tokens": tokens, "grads": grads, "log_probs": found.detach()}


def train(cp: ContextParallel, prompt: int, answer: int, steps: int) -> dict[str, list[float]]:
    """Train; return what was seen, of every generation or update."""
    plain, model = tiny_llama(prompt + answer), prepare(tiny_llama(prompt + answer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    names = ("reward", "difference", *(f"{what}, {way}" for what in ("loss", "seconds", "tokens") for way in WAYS))
    seen: dict[str, list[float]] = {name: [] for name in names}
    torch.manual_seed(cp.rank)  # every rank has prompts and answers of its own
    for step in range(steps):
        rollouts = draw_rollouts(plain, prompt, answer)
        rewards, old = rewards_of(rollouts, answer), None
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for update in range(UPDATES):
            ways = {
                "folded": (model, partial(folded, model, rollouts, answer, cp)),
                "unfolded": (plain, partial(unfolded, plain, rollouts, answer)),
            }
            order = WAYS if (step + update) % 2 else WAYS[::-1]
            now = {way: gradients(*ways[way], old, advantages) for way in order}
            old = now["folded"]["log_probs"] if old is None else old
            for way in WAYS:
                for what in ("loss", "seconds", "tokens"):
                    seen[f"{what}, {way}"].append(now[way][what])
            one, other = (now[way]["grads"] for way in WAYS)
            seen["difference"].append(float((one - other).norm() / other.norm()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            plain.load_state_dict(model.state_dict())
        mean = rewards.mean() / cp.ranks
        dist.all_reduce(mean)
        seen["reward"].append(float(mean))
        if cp.rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3}: {mean:.0%} of the answers' tokens are right", flush=True)
    return seen


def medians(seen: dict[str, list[float]], what: str) -> list[float]:
    """Return the median of a number, folded and unfolded."""
    return [statistics.median(seen[f"{what}, {way}"]) for way in WAYS]


def report(seen: dict[str, list[float]]) -> None:
    """Print what folding changes."""
    pairs = zip(seen["loss, folded"], seen["loss, unfolded"], strict=True)
    largest = max(abs(one - other) for one, other in pairs)
    print(f"largest difference of losses {largest:.1e}, of gradients {max(seen['difference']):.1e} of their norm")
    for what, digits in (("tokens", 0), ("seconds", 3)):
        few, many = medians(seen, what)
        print(f"{what} of an update: {many:,.{digits}f} unfolded, {few:,.{digits}f} folded: {many / few:.1f} x")


def draw(seen: dict[str, list[float]], path: str) -> None:
    """Write the picture: what was learned, the losses both ways, and what folding saves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    blue, orange = "#0072B2", "#E69F00"  # that colour-blind readers can tell apart
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), width_ratios=[3, 4, 1.6, 1.6], layout="constrained")
    axes[0].plot([100 * each for each in seen["reward"]], color="black")
    axes[0].set(title="Right tokens, %", xlabel="generation", ylim=(0, 100))
    axes[1].plot(seen["loss, unfolded"], color=orange, linewidth=4, label="unfolded, each rank by itself")
    dashed = {"color": blue, "linewidth": 1.2, "linestyle": (0, (4, 2))}
    axes[1].plot(seen["loss, folded"], **dashed, label="folded over the ring")
    axes[1].set(title="Loss", xlabel="update")
    axes[1].legend(frameon=False)
    for axis, what, unit in ((axes[2], "tokens", 1), (axes[3], "seconds", 1e3)):
        few, many = (each * unit for each in medians(seen, what))
        bars = axis.bar(["unfolded", "folded"], [many, few], color=[orange, blue], width=0.6)
        axis.bar_label(bars, [f"{many:,.0f}", f"{few:,.0f}"])
        axis.set(title="Tokens of an update" if what == "tokens" else "Time of an update, ms", yticks=[])
        axis.margins(y=0.15)
        axis.spines["left"].set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, report, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--steps", type=int, default=20, help="generations, two updates each (default: 20)")
    parser.add_argument("--out", default="grpo.png", help="the picture (default: grpo.png)")
    parser.add_argument("--smoke", action="store_true", help="two generations of a few tokens")
    options = parser.parse_args()
    try:  # before training, and alike on all ranks
        importlib.import_module("matplotlib")
    except ImportError:
        parser.exit(1, "grpo.py draws its picture with matplotlib, which is not installed: pip install matplotlib\n")
    sizes = (24, 6, 2) if options.smoke else (options.prompt, options.answer, options.steps)
    dist.init_process_group("gloo")
    cp = ContextParallel(dist.group.WORLD)
    seen = train(cp, *sizes)
    if cp.rank == 0:
        report(seen)
        draw(seen, options.out)
        print(f"picture: {options.out}")
    cp.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
