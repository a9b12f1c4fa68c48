"""An MLP in chunks of tokens against the same MLP at once: outputs, every gradient, and what is made on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import Strategy
from burst_plugin.activations.chunked_mlp import ChunkedForward, chunked_mlp
from burst_plugin.activations.replaced_forward import restore_forward
from tests.support.largest import LargestTensor
from tests.support.ranks import run_ranks

HIDDEN, FFN, CHUNK = 8, 64, 8


class Mlp(torch.nn.Module):
    """Gated, as most are today; with dropout if asked for."""

    def __init__(self, hidden: int = HIDDEN, ffn: int = FFN, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, ffn, bias=bias)
        self.up = torch.nn.Linear(hidden, ffn, bias=bias)
        self.down = torch.nn.Linear(ffn, hidden, bias=bias)
        self.dropout = torch.nn.Dropout(dropout)
        self.calls = 0
        self.types: set[torch.dtype] = set()  # of the intermediate

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        inner = self.dropout(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        self.types.add(inner.dtype)
        out: Tensor = self.down(inner)
        return out


def in_chunks(mlp: torch.nn.Module, chunk: int = CHUNK) -> torch.nn.Module:
    """The same module with its own parameters, in chunks."""
    mlp = copy.deepcopy(mlp)
    mlp.forward = ChunkedForward(mlp, chunk)
    return mlp


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def grads_of(
    mlp: torch.nn.Module, x: Tensor, run: Callable[[Any, Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of all parameters that have one."""
    x = x.detach().clone().requires_grad_(True)
    out = mlp(x) if run is None else run(mlp, x)
    out.backward(draw(*out.shape, seed=9).to(out.dtype))
    found = {"out": out.detach(), "x": x.grad}
    found |= {name: each.grad for name, each in mlp.named_parameters() if each.grad is not None}
    return found  # type: ignore[return-value]


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert found[name].dtype == truth.dtype, name
        assert float((found[name] - truth).norm()) <= bound * float(truth.norm()), name


@pytest.mark.parametrize("shape", [(2, 29, HIDDEN), (29, HIDDEN), (1, 3, HIDDEN), (2, 2, 5, HIDDEN)])
@pytest.mark.parametrize("chunk", [1, CHUNK, 1000])
def test_outputs_and_gradients_are_those_of_the_whole(shape: tuple[int, ...], chunk: int) -> None:
    torch.manual_seed(0)
    mlp = Mlp()
    check_equal(grads_of(in_chunks(mlp, chunk), draw(*shape)), grads_of(mlp, draw(*shape)))


def test_an_output_that_is_added_to_in_place() -> None:
    """As models with parallel attention do, such as Falcon."""
    torch.manual_seed(0)
    mlp, x = Mlp(), draw(2, 29, HIDDEN)

    def run(mlp: Any, x: Tensor) -> Tensor:
        out: Tensor = mlp(x)
        out += x
        return out

    check_equal(grads_of(in_chunks(mlp), x, run), grads_of(mlp, x, run))


def test_inputs_and_gradients_that_are_not_dense() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(), draw(HIDDEN, 29, 2)

    def run(mlp: Any, x: Tensor) -> Tensor:
        return mlp(x.transpose(0, 2)).transpose(0, 1)  # type: ignore[no-any-return]

    check_equal(grads_of(in_chunks(mlp), x, run), grads_of(mlp, x, run))


def test_bfloat16_is_about_as_exact_as_the_whole() -> None:
    """Errors against float64, at 64 chunks. Gradients that were summed in bfloat16 would be off by more."""
    torch.manual_seed(0)
    whole, tokens = Mlp(32, 128, bias=False).bfloat16(), 2048
    x = draw(1, tokens, 32).bfloat16()
    truth = grads_of(copy.deepcopy(whole).double(), x.double())
    errors = []
    for mlp in (whole, in_chunks(whole, tokens // 64)):
        found = grads_of(mlp, x)
        errors.append({name: float((found[name].double() - truth[name]).norm()) for name in truth})
    for name in truth:
        assert errors[1][name] <= 1.2 * errors[0][name], (name, errors)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_no_tensor_is_larger_than_a_chunk_of_the_intermediate(reentrant: bool | None) -> None:
    """Sizes are chosen such that inputs and weights have as many elements."""
    tokens = CHUNK * FFN // HIDDEN
    run = None if reentrant is None else lambda mlp, x: checkpoint(mlp, x, use_reentrant=reentrant)
    largest = []
    for mlp in (Mlp(), in_chunks(Mlp())):
        with LargestTensor() as noted:
            grads_of(mlp, draw(1, tokens, HIDDEN), run)
        largest.append(noted.elements)
    assert largest == [tokens * FFN, CHUNK * FFN]


def test_nothing_but_the_input_is_kept() -> None:
    kept: list[Tensor] = []
    mlp, x = in_chunks(Mlp()), draw(1, 64, HIDDEN).requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        mlp(x)
    assert [each.data_ptr() for each in kept] == [x.data_ptr()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_under_outer_checkpoints(reentrant: bool, dropout: float) -> None:
    torch.manual_seed(0)
    mlp = in_chunks(Mlp(dropout=dropout))
    found = []
    for inside in (False, True):
        torch.manual_seed(1)
        run = (lambda mlp, x: checkpoint(mlp, x, use_reentrant=reentrant)) if inside else None
        found.append(grads_of(copy.deepcopy(mlp), draw(2, 29, HIDDEN), run))
    check_equal(*found, bound=0.0)


def test_a_checkpoint_computes_one_chunk_before_the_backward_pass_computes_all() -> None:
    mlp: Any = in_chunks(Mlp())

    def layer(x: Tensor) -> Tensor:
        return x + mlp(torch.nn.functional.layer_norm(x, (HIDDEN,)))

    x = draw(4, 2 * CHUNK, HIDDEN).requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False)
    assert mlp.calls == 8
    out.sum().backward()
    assert mlp.calls == 8 + 1 + 8  # as often as an MLP at once under a checkpoint, but for one chunk


def test_dropout_is_that_of_the_forward_pass() -> None:
    """The masks that the forward pass drew are drawn again by hand; and the random state after it is left alone."""
    torch.manual_seed(0)
    mlp, x = Mlp(dropout=0.5), draw(1, 29, HIDDEN)

    def piecewise(mlp: Any, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out = torch.cat([mlp(piece) for piece in x.split(CHUNK, 1)], 1)
        torch.rand(3)  # what comes between the two passes
        return out

    def at_once(mlp: Any, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out: Tensor = mlp(x)
        torch.rand(3)
        return out

    chunks = in_chunks(mlp)
    found = grads_of(chunks, x, at_once)
    state = torch.get_rng_state()
    check_equal(found, grads_of(mlp, x, piecewise))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(backward_inside: bool) -> None:
    """Where both passes are inside, weights cast for the forward pass are not those of the backward pass."""
    torch.manual_seed(0)
    mlp, x = Mlp(), draw(2, 29, HIDDEN)

    def inside(mlp: Any, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return grads_of(mlp, x)

    def outside(mlp: Any, x: Tensor) -> dict[str, Tensor]:
        def run(mlp: Any, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return mlp(x)  # type: ignore[no-any-return]

        return grads_of(mlp, x, run)

    run = inside if backward_inside else outside
    exact = grads_of(copy.deepcopy(mlp).double(), x.double())
    chunks = in_chunks(mlp)
    found, expected = run(chunks, x), run(mlp, x)
    assert chunks.types == {torch.bfloat16}
    assert found.keys() == expected.keys()
    for name, truth in exact.items():
        error, of_whole = ((each[name].double() - truth).norm() for each in (found, expected))
        assert found[name].dtype == expected[name].dtype
        assert float(error) <= 1.2 * float(of_whole), name


class _Wide(torch.nn.Module):
    """An MLP that computes in float32 whatever is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.down(torch.nn.functional.silu(self.up(x.float())))  # type: ignore[no-any-return]


def test_code_in_float32_has_gradients_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    mlp, x, grad = _Wide(), draw(2, 29, HIDDEN), draw(2, 29, HIDDEN)
    found = []
    for run in (mlp, partial(chunked_mlp, mlp, parameters=list(mlp.parameters()), chunk=8)):
        hidden = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(hidden)
        found.append(torch.autograd.grad(out, [hidden, *mlp.parameters()], grad))
    for whole, chunks in zip(*found, strict=True):
        torch.testing.assert_close(chunks, whole, rtol=1e-5, atol=1e-6)


def test_a_compiled_layer_calls_it_between_two_graphs() -> None:
    """It writes chunks into its output after autograd has seen the first, which the compiler does not trace."""

    def layer(mlp: Mlp, x: Tensor) -> Tensor:
        return x + chunked_mlp(mlp, 2 * x, list(mlp.parameters()), chunk=CHUNK)

    mlp, x = Mlp(), draw(2, 21, HIDDEN)
    compiled = torch.compile(layer, backend="aot_eager")
    check_equal(grads_of(copy.deepcopy(mlp), x, compiled), grads_of(mlp, x, layer))


def _of_a_unit(rank: int) -> dict[str, Tensor]:
    """The output and gradients of an MLP that is a unit of `fully_shard`; ranks have 21 and 5 rows in chunks of 8."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mlp = fully_shard(Mlp())
    run = lambda mlp, x: chunked_mlp(mlp, x, list(mlp.parameters()), chunk=CHUNK)  # noqa: E731
    found = grads_of(mlp, draw(1, 26, HIDDEN)[:, slice(21, None) if rank else slice(21)], run)
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def test_a_unit_of_fully_shard_gathers_its_weights_once_for_all_chunks() -> None:
    torch.manual_seed(0)
    mlp, (left, right) = Mlp(), draw(1, 26, HIDDEN).split((21, 5), dim=1)
    first, second = grads_of(copy.deepcopy(mlp), left), grads_of(copy.deepcopy(mlp), right)
    for found, own in zip(run_ranks(_of_a_unit, 2, timeout_s=60.0), (first, second), strict=True):
        mean = {name: (first[name] + second[name]) / 2 for name in first if name not in ("out", "x")}
        check_equal(found, {"out": own["out"], "x": own["x"], **mean})


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    torch.manual_seed(0)
    mlp = Mlp()
    for each in (mlp.up.weight, mlp.down.bias):
        each.requires_grad_(False)
    check_equal(grads_of(in_chunks(mlp), draw(2, 29, HIDDEN)), grads_of(mlp, draw(2, 29, HIDDEN)))
    chunks = in_chunks(mlp)
    chunks(draw(2, 29, HIDDEN)).sum().backward()
    assert chunks.gate.weight.grad is not None
    assert chunks.up.weight.grad is None
    for each in chunks.parameters():
        each.requires_grad_(False)
    x = draw(2, 29, HIDDEN).requires_grad_(True)
    chunks(x).sum().backward()
    assert x.grad is not None
    assert not chunks(x.detach()).requires_grad


def test_shared_and_unused_parameters() -> None:
    class Shared(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.up = self.gate
            self.idle = torch.nn.Parameter(torch.ones(3))

    torch.manual_seed(0)
    mlp = Shared()
    found = grads_of(in_chunks(mlp), draw(2, 29, HIDDEN))
    check_equal(found, grads_of(mlp, draw(2, 29, HIDDEN)))
    assert "idle" not in found


def test_a_weight_that_is_listed_twice_gets_its_gradient_once() -> None:
    """As in `[*a.parameters(), *b.parameters()]` of modules with tied weights."""
    weight = torch.nn.Parameter(draw(HIDDEN, HIDDEN))

    def tied(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight) @ weight.t()

    def grads(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = draw(2, 29, HIDDEN).requires_grad_()
        return torch.autograd.grad(run(x).square().sum(), (weight, x))

    found = grads(lambda x: chunked_mlp(tied, x, [weight, weight], chunk=CHUNK))
    torch.testing.assert_close(found, grads(tied), rtol=1e-5, atol=1e-4)


def test_gradients_that_autograd_gives_to_several() -> None:
    """Sums are not made in tensors that belong to others: here the gradient of the output, given to all."""
    x, twins = draw(29, HIDDEN), [torch.nn.Parameter(draw(1, HIDDEN)) for _ in range(2)]
    grad = draw(29, HIDDEN, seed=9)
    before = grad.clone()
    chunked_mlp(lambda piece: piece + twins[0] + twins[1], x, twins, chunk=1).backward(grad)
    assert torch.equal(grad, before)
    for twin in twins:
        torch.testing.assert_close(twin.grad, grad.sum(0, keepdim=True))


def test_without_gradients_it_only_computes_in_chunks() -> None:
    mlp = Mlp()
    chunks = in_chunks(mlp)
    with torch.no_grad():
        out = chunks(draw(1, 29, HIDDEN))
    assert not out.requires_grad
    assert chunks.calls == 4
    assert torch.allclose(out, mlp(draw(1, 29, HIDDEN)), atol=1e-6)
    assert chunks(draw(1, 0, HIDDEN)).shape == (1, 0, HIDDEN)


def test_hooks_on_parameters_run_once() -> None:
    """As those that reduce gradients over ranks do; what a hook makes of a gradient is made of the sum."""
    torch.manual_seed(0)
    mlp = Mlp()
    ran = []

    def hooked(mlp: Any) -> Any:
        mlp.gate.weight.register_hook(lambda grad: grad * 3)
        mlp.up.weight.register_post_accumulate_grad_hook(lambda each: ran.append(each))
        return mlp

    chunks = hooked(in_chunks(mlp))
    check_equal(grads_of(chunks, draw(1, 29, HIDDEN)), grads_of(hooked(mlp), draw(1, 29, HIDDEN)))
    assert len(ran) == 2
    assert len(chunks.gate.weight._backward_hooks) == 1


def test_hooks_on_parameters_that_are_not_used_do_not_run() -> None:
    """As without chunks, also beside a gradient that is there already; they run once the parameter is used."""
    used, idle, x = torch.nn.Parameter(draw(HIDDEN)), torch.nn.Parameter(draw(HIDDEN)), draw(1, 29, HIDDEN)
    ran: list[str] = []
    idle.register_post_accumulate_grad_hook(lambda each: ran.append("after"))
    idle.register_hook(lambda grad: ran.append("before") or 3 * grad)

    def backward(*weights: Tensor) -> list[str]:
        ran.clear()
        chunked_mlp(lambda piece: piece * sum(weights), x, [used, idle], chunk=CHUNK).sum().backward()
        return [*ran]

    assert backward(used) == []
    assert idle.grad is None
    assert backward(used, idle) == ["before", "after"]
    assert backward(used) == []
    torch.testing.assert_close(idle.grad, 3 * x.sum((0, 1)))
    (chunked_mlp(lambda piece: piece * used, x, [used, idle], chunk=CHUNK).sum() + idle.sum()).backward()
    assert ran == ["before", "after"]


def test_a_parameter_that_adds_itself_up_is_left_to_it() -> None:
    """What autograd gets for such a parameter means nothing; it is not summed, and reaches its hooks once."""
    weight = torch.nn.Parameter(draw(HIDDEN, HIDDEN))

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            buffer.add_(x.flatten(0, -2).T @ grad.flatten(0, -2))
            return grad @ weight.T, torch.ones_like(weight)

    buffer = torch.zeros(HIDDEN, HIDDEN)
    x = draw(1, 29, HIDDEN)
    out = chunked_mlp(lambda x: Fused.apply(x, weight), x, [weight], chunk=4, adds_itself=lambda each: True)
    out.sum().backward()
    assert torch.allclose(buffer, x[0].sum(0)[:, None].expand(-1, HIDDEN), atol=1e-5)
    assert weight.grad is not None
    assert bool((weight.grad == 1).all())


def test_copies_of_a_module_have_their_own_parameters() -> None:
    torch.manual_seed(0)
    mlp = Mlp()
    twin = copy.deepcopy(in_chunks(mlp))
    with torch.no_grad():
        twin.down.weight.zero_()
        twin.down.bias.zero_()
    assert not twin(draw(1, 29, HIDDEN)).any()
    assert twin.state_dict().keys() == mlp.state_dict().keys()


def test_the_earlier_forward_comes_back() -> None:
    mlp = Mlp()
    mlp.forward = ChunkedForward(mlp, 4)
    assert restore_forward(mlp)
    assert "forward" not in vars(mlp)
    assert not restore_forward(mlp)

    def other(x: Tensor) -> Tensor:
        return x

    mlp.forward = other
    mlp.forward = ChunkedForward(mlp, 4)
    assert restore_forward(mlp)
    assert mlp.forward is other


def test_what_cannot_be_cut_is_refused() -> None:
    x = draw(1, 29, HIDDEN)
    with pytest.raises(ValueError, match=r"an MLP in chunks returned tuple for \[1, 4, 8\], expected one tensor"):
        chunked_mlp(lambda x: (x, x), x, [], chunk=4)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"returned Tensor \[1, 8\].* expected one tensor with a row for each token"):
        chunked_mlp(lambda x: x.sum(1), x, [], chunk=4)
    with pytest.raises(ValueError, match="Mlp in chunks got more than one tensor, of which one can be cut"):
        in_chunks(Mlp())(x, x)
    with pytest.raises(ValueError, match="chunk=0 is not valid; use a positive number of tokens"):
        chunked_mlp(lambda x: x, x, [], chunk=0)


@pytest.mark.parametrize("value", [-1, 2.5, "4", None, True])
def test_an_option_that_is_no_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"mlp_chunk=.* is not valid; use a number of tokens, or 0 for all at once"):
        Strategy(mlp_chunk=value)


def test_a_trained_tensor_that_is_not_listed_is_refused() -> None:
    """Others' parameters, what is computed of them or of the input, and one half of what is listed by the other."""
    mlp, x = Mlp(), draw(1, 29, HIDDEN).requires_grad_(True)
    gain, flat = torch.nn.Parameter(torch.ones(HIDDEN)), torch.nn.Parameter(torch.ones(2 * HIDDEN))
    first, second = flat.split(HIDDEN)

    def run(scale: Tensor, *others: Tensor) -> None:
        chunked_mlp(lambda piece: mlp(piece) * scale, x, [*mlp.parameters(), *others], chunk=4).sum().backward()

    for scale, size in ((gain, HIDDEN), (gain.exp(), HIDDEN), (second, 2 * HIDDEN), (x[0, 0].exp(), "1, 29, 8")):
        with pytest.raises(ValueError, match=rf"an MLP in chunks uses a trained tensor \[{size}\] that is not among"):
            run(scale, first)
    run(gain, gain)
    assert gain.grad is not None
    assert flat.grad is None


def test_weights_that_are_changed_before_the_backward_pass_are_refused() -> None:
    """As autograd does for weights that it has saved. Frameworks that move weights set `data`, which is no change."""
    chunks, x = in_chunks(Mlp()), draw(1, 29, HIDDEN)
    out = chunks(x)
    for each in chunks.parameters():
        each.data = each.data.clone()
    out.sum().backward(retain_graph=True)
    with torch.no_grad():
        chunks.down.weight.mul_(3)
    with pytest.raises(
        RuntimeError, match=r"parameter down\.weight \[8, 64\] of what runs in chunks, .* was modified in place"
    ):
        out.sum().backward()
    chunks(x).sum().backward()


class _Adapter(torch.nn.Linear):
    """With the attributes of a layer of PEFT."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.merged_adapters: list[str] = []
        self.disable_adapters, self.active_adapters = False, ["a"]

    @property
    def merged(self) -> bool:
        """As in PEFT."""
        return bool(self.merged_adapters)


def _change(module: Any, what: str) -> None:
    if what == "eval":
        module.eval()
    elif what == "merged":
        module[0].merged_adapters.append("a")
    elif what == "weight":
        module[0].weight = torch.nn.Parameter(module[0].weight.detach() / 2, requires_grad=False)
    else:
        setattr(module[0], what, {"disable_adapters": True, "active_adapters": ["b"]}[what])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("eval", "training=False, which was True"),
        ("merged", r"0\.merged=True, which was False"),
        ("disable_adapters", r"0\.disable_adapters=True, which was False"),
        ("active_adapters", r"0\.active_adapters=\['b'\], which was \['a'\]"),
        ("weight", r"another parameter 0\.weight than in the forward pass"),
    ],
)
def test_a_module_that_is_not_as_it_was_is_refused(what: str, said: str, frozen: bool) -> None:
    """It is run again, and would give gradients of what it computes now."""
    x = draw(1, 29, HIDDEN).requires_grad_()
    for run_in_chunks in (True, False):
        module = torch.nn.Sequential(_Adapter(), torch.nn.Dropout(0.5)).requires_grad_(not frozen)
        parameters = list(module.parameters())
        if run_in_chunks:
            module.forward = ChunkedForward(module, CHUNK)
        out = module(x) if run_in_chunks else chunked_mlp(module, x, parameters, chunk=CHUNK)
        _change(module, what)
        with pytest.raises(RuntimeError, match=f"Sequential runs in chunks, .* but has {said}"):
            out.sum().backward()


@pytest.mark.parametrize("inside", [True, False])
def test_weights_of_functional_call_are_trained_or_refused(inside: bool) -> None:
    module, x = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False), draw(1, 29, HIDDEN)
    given = {name: (each * 1.7).requires_grad_() for name, each in module.named_parameters()}

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.inner(x).square().sum()
            if inside:
                loss.backward()
            return loss

    step, named = Step(), {f"inner.{name}": each for name, each in given.items()}
    inside, once = False, inside
    expected = torch.autograd.grad(torch.func.functional_call(step, named, (x,)), list(given.values()))
    inside = once
    module.forward = ChunkedForward(module, CHUNK)
    loss = torch.func.functional_call(step, named, (x,))
    if inside:
        torch.testing.assert_close([each.grad for each in given.values()], list(expected), rtol=1e-5, atol=1e-4)
        return
    with pytest.raises(RuntimeError, match="another parameter weight than in the forward pass"):
        loss.backward()
