"""A ring of one rank, as "auto" makes it on one GPU: models get whole batches, and return what they always do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import deepspeed
import pytest
import torch
import transformers
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

import burst_plugin.deepspeed as burst
from tests.support.deepspeed_run import Run, configuration, llama
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

VOCAB = 50
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[0, 0, 0, *[1] * 6], [1] * 9])


def _batch(padding: Tensor | None) -> dict[str, Tensor]:
    if padding is None:
        return {"input_ids": IDS, "labels": IDS}
    labels = IDS.masked_fill(padding == 0, -100)
    return {"input_ids": IDS * padding, "labels": labels, "attention_mask": padding}


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(llama(num_hidden_layers=1))


def _roberta() -> transformers.PreTrainedModel:
    """Which counts positions from padding on, if it is given none."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.RobertaConfig(**SHAPE, **ATTENTION, **dropout, is_decoder=True)
    return transformers.RobertaForCausalLM(config)


def _lfm2() -> transformers.PreTrainedModel:
    """Whose convolutions have to know of padding."""
    kinds = ["conv", "full_attention"]
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**SHAPE, **ATTENTION, num_key_value_heads=2, layer_types=kinds)
    )


def _mamba() -> transformers.PreTrainedModel:
    """Without attention."""
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SHAPE, state_size=4))


def _trained(
    rank: int, build: Callable[[], transformers.PreTrainedModel], padding: Tensor | None
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Logits, loss and a gradient of a loss of one's own: of the engine, and of the model alone."""
    torch.manual_seed(0)
    model = build().train()
    name, parameter = next(iter(model.named_parameters()))
    alone = model(**_batch(padding))
    (expected,) = torch.autograd.grad(_own_loss(alone.logits), parameter)
    burst.install()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(Run(cp=1), 1))
    out = engine(**_batch(padding))
    engine.backward(_own_loss(out.logits))
    grad = safe_get_full_grad(parameter)
    return {
        "logits": (out.logits.detach(), alone.logits.detach()),
        "loss": (out.loss.detach(), alone.loss.detach()),
        name: (grad, expected),
    }


def _own_loss(logits: Tensor) -> Tensor:
    """On the last tokens, counted from the end, as preference losses take them."""
    return logits[:, -4:].float().logsumexp(-1).sum()


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "left padding"])
@pytest.mark.parametrize("build", [_llama, _roberta, _lfm2, _mamba])
def test_it_computes_what_the_model_does_alone(
    build: Callable[[], transformers.PreTrainedModel], padding: Tensor | None
) -> None:
    """At every real token: padding attends to other things in each implementation of attention."""
    (found,) = run_ranks(_trained, 1, build, padding)
    for name, (got, expected) in found.items():
        assert got.shape == expected.shape, name
        real = (padding > 0) if padding is not None and name == "logits" else ...
        torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-5, msg=name)


def _cut_before(rank: int) -> str:
    """A batch that was cut, for a model that wants whole ones."""
    burst.install()
    model = _mamba().train()
    model.own = torch.nn.ModuleList([torch.nn.Conv1d(2, 2, 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(Run(cp=1), 1))
    with pytest.raises(ValueError, match="got a batch that was cut") as raised:
        engine(**burst.shard_batch(_batch(None)))
    return str(raised.value)


def test_a_model_that_wants_whole_batches_is_given_no_shard() -> None:
    (text,) = run_ranks(_cut_before, 1)
    assert "it carries a state along the sequence" in text
    assert text.endswith("On a ring of one rank give it whole batches")
