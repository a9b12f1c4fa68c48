"""A tiny Llama learns to find a passkey in 8,192 tokens over four ranks, and then generates it over the same ring.

    torchrun --nproc-per-node 4 examples/generate.py

Somewhere in noise five different digits follow a mark. The text ends with the mark, and the digits are to follow. The
model learns it in short texts, of which each rank has its own, then in longer ones, up to the full length, of which
each rank has a quarter. That takes about five minutes on two cores. `--smoke` shows in seconds that everything runs;
so little is learned then.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import burst_plugin
from burst_plugin import ContextParallel
from burst_plugin.huggingface import RingCache, prepare

MARK, NOISE, VOCABULARY, DIGITS = 10, 16, 64, 5
ENOUGH, RECENT = 0.98, 12  # digits that have to be right, in so many steps
IGNORED = -100
RATES, SHORT = {48: 3e-3, 256: 2e-3, 1024: 1e-3}, 256  # by length


def texts(count: int, length: int, generator: torch.Generator, times: int) -> dict[str, Tensor]:
    """Return texts that tell a passkey so many times and at the end; labels are its digits but for the first time."""
    ids = torch.randint(NOISE, VOCABULARY, (count, length), generator=generator)
    digits = torch.rand(count, MARK, generator=generator).argsort(1)[:, :DIGITS]
    told, labels = torch.cat([torch.full((count, 1), MARK), digits], 1), torch.full_like(ids, IGNORED)
    room = (length - told.shape[1]) // times
    starts = torch.randint(room - told.shape[1] + 1, (count, times), generator=generator)
    starts += room * torch.arange(times)
    for row, row_labels, places, key in zip(ids, labels, starts.tolist(), told, strict=True):
        for number, place in enumerate([*places, length - len(key)]):
            row[place : place + len(key)] = key
            if number:
                row_labels[place + 1 : place + len(key)] = key[1:]
    return {"input_ids": ids, "labels": labels}


def learn(model: PreTrainedModel, length: int, most: int, cp: ContextParallel, on_ring: bool) -> None:
    """Train on texts of one length until it finds their passkeys, or for `most` steps."""
    seed = length if on_ring else length + cp.rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES.get(length, 5e-4), betas=(0.9, 0.98))
    generator, recent, began, steps = torch.Generator().manual_seed(seed), [], time.perf_counter(), 0
    while steps < most and not (len(recent) == RECENT and sum(recent) / RECENT >= ENOUGH):
        steps += 1
        told_once = on_ring or (
            length > SHORT and steps % 2
        )  # as in the end; where it is told often, it is found early
        batch = texts(max(2, min(32 // cp.ranks, 4096 // length)), length, generator, 1 if told_once else 4)
        inputs = dict(burst_plugin.shard_batch(batch, cp)) if on_ring else shifted(batch)
        labels = inputs.pop("shift_labels")
        logits, real = model(**inputs, use_cache=False).logits, labels != IGNORED
        loss = torch.nn.functional.cross_entropy(logits[real], labels[real], reduction="sum")
        right = (logits[real].argmax(-1) == labels[real]).sum()
        optimizer.zero_grad()
        (loss + 0 * logits.sum()).backward()  # also on ranks without labels
        found = summed(torch.stack([loss.detach(), right.float(), real.sum().float()]))
        for parameter in model.parameters():
            parameter.grad = summed(parameter.grad) / found[2]
        optimizer.step()
        recent = [*recent, float(found[1] / found[2])][-RECENT:]
    if cp.rank == 0:
        how = "on the ring" if on_ring else "by each rank"
        seconds = time.perf_counter() - began
        print(
            f"{length:6} tokens {how}: {steps} steps, loss {float(found[0] / found[2]):.3f}, "
            f"{sum(recent) / len(recent):.0%} of digits, {seconds:.0f} s",
            flush=True,
        )


def shifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a whole batch with labels moved by a token, as those of shards are."""
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {"input_ids": batch["input_ids"], "shift_labels": labels}


def summed(x: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    dist.all_reduce(x)
    return x


def ask(model: PreTrainedModel, count: int, length: int, cp: ContextParallel) -> None:
    """Have passkeys generated in texts that were not seen before, and print how many are right."""
    batch = texts(count, length, torch.Generator().manual_seed(length + 1000), times=1)
    prompts, digits = batch["input_ids"].split([length - DIGITS, DIGITS], 1)
    right = torch.zeros(())
    began = time.perf_counter()
    for prompt, expected in zip(prompts.split(2), digits.split(2), strict=True):
        cache = RingCache(cp, reserve=length)
        options = {"past_key_values": cache, "do_sample": False, "pad_token_id": MARK + 1, "eos_token_id": None}
        told = model.generate(prompt, max_new_tokens=1, **options)  # the prompt is read by all ranks together
        before = cache.bytes_sent
        told = model.generate(told, max_new_tokens=DIGITS - 1, **options)  # goes on after it
        sent = {link: (n - before[link]) // (DIGITS - 1) for link, n in cache.bytes_sent.items()}
        right += (told[:, -DIGITS:] == expected).all(1).sum()
    seconds = time.perf_counter() - began
    if cp.rank == 0:
        print(f"passkeys found in {length} tokens: {int(right)} of {count}, {seconds:.0f} s", flush=True)
    dist.barrier()
    print(f"rank {cp.rank}: cache of 2 texts {cache.bytes} bytes; sent per token {sent}\n", end="", flush=True)


def main() -> None:
    """Train, then ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the longest texts (default: 8192)")
    parser.add_argument("--smoke", action="store_true", help="a few steps at 1,024 tokens")
    options = parser.parse_args()
    length, most = (1024, 3) if options.smoke else (options.length, 3000)
    dist.init_process_group("gloo")
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)  # nodes of two; on a cluster leave ranks_per_node out
    torch.manual_seed(0)  # the same model on every rank
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},  # what is found depends little on where it is
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for each in (n for n in (48, 256, 1024) if n < length):
        learn(model, each, most, cp, on_ring=False)
    prepare(model)
    learn(model, length, min(most, 120), cp, on_ring=True)
    ask(model.eval(), 2 if options.smoke else 16, length, cp)
    cp.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
