"""Sliced layers compute what whole layers do: outputs, gradients and trained weights, on 2, 3 and 4 processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.utils import parametrizations, prune

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite_torch.slicing.rules import find
from tests.support.processes import process_group as process_group
from tests.support.processes import processes

WIDTH, HEADS, BATCH, LENGTH = 24, 12, 3, 5


def everybody() -> hvd.ProcessSet:
    return hvd.global_process_set


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words() -> torch.Tensor:
    return torch.randint(48, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def perceptron(last: int = 7) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 36),
        nn.GELU(),
        nn.Dropout(0.0),
        nn.Linear(36, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, last),
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, bias=False),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Decoder(nn.Module):
    """A decoder over what it has been given, with a causal mask, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        return self.layer(x, 2 * x.flip(0), tgt_mask=mask)


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(48, WIDTH), nn.LayerNorm(WIDTH))


class Tied(nn.Module):
    """A model that reads the weights of its embeddings by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(48, WIDTH), nn.Embedding(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.words(x) + self.positions.weight[: x.shape[1]], self.words.weight)


def padded_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(48, WIDTH, padding_idx=int(words()[0, 0])), nn.LayerNorm(WIDTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "perceptron": (perceptron, lambda: numbers(BATCH, WIDTH), 1),
    "convolutions": (convolutions, lambda: numbers(BATCH, 3, 8, 8), 2),
    "encoder": (encoder, lambda: numbers(BATCH, LENGTH, WIDTH), 4),
    "decoder": (Decoder, lambda: numbers(LENGTH, BATCH, WIDTH), 3),
    "embeddings whose weights are read": (Tied, words, 2),
    "embedding": (embedding, words, 1),
    "embedding with padding": (padded_embedding, words, 1),
}
"""For each model: itself, its input, and how many things are sliced."""


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Train, and return the outputs; for an input of floating-point numbers, the gradients of the input too."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        given = x.clone().requires_grad_(x.is_floating_point())
        output = model(given)
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).mean().backward()
        optimizer.step()
        found += [output.detach(), *([given.grad] if given.grad is not None else [])]
    return found


@processes
@pytest.mark.parametrize("name", MODELS)
def test_a_sliced_model_trains_as_a_whole_one_does(name: str) -> None:
    make, input_of, count = MODELS[name]
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(hvd.rank())  # the ranks take the weights of the first one
    model = copy.deepcopy(plain) if hvd.rank() == 0 else make().double()
    plan = hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    assert sum(entry.sliced for entry in plan._entries) == count
    for ours, wanted in zip(train(model, input_of()), train(plain, input_of()), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    state = plan.full_state_dict()
    assert state.keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)
    slices = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert slices
    model.eval()
    plain.eval()
    with torch.no_grad():  # torch's transformer layers have another path for this
        torch.testing.assert_close(model(input_of()), plain(input_of()), rtol=0, atol=1e-12)


@processes
def test_slices_in_a_second_default_group_forget_those_of_the_first() -> None:
    """Torch names a group by how many there are, and DTensor keeps what it knows of a mesh for all equal meshes."""
    x, found = numbers(BATCH, WIDTH), []
    for others in (0, 2):
        for _ in range(others):
            torch.distributed.new_group(list(range(hvd.size())))
        torch.manual_seed(0)
        model = perceptron().double()
        hvd.slice_layers(model, everybody(), {"0": "columns", "3": "rows"}, verbose=False)
        found.append(train(model, x))
        torch.distributed.destroy_process_group()
        hvd.init(torch_distributed=True)
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@processes
def test_torch_clips_slices_and_plain_parameters_together() -> None:
    torch.manual_seed(0)
    plain = perceptron().double()
    model = copy.deepcopy(plain)
    hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    for each in (model, plain):
        each(numbers(BATCH, WIDTH)).square().sum().backward()
    for norm in (2.0, float("inf")):
        joint, wanted = (float(nn.utils.clip_grad_norm_(each.parameters(), 0.1, norm)) for each in (model, plain))
        assert joint == pytest.approx(wanted, abs=1e-12)
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=1e-12)
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    assert all(parameter.grad.abs().max() <= 1e-4 for parameter in model.parameters() if parameter.grad is not None)


@processes
@pytest.mark.parametrize("name", ["encoder", "convolutions"])
def test_a_checkpoint_of_slices_is_whole(name: str, tmp_path: Path) -> None:
    """One process loads it; a sliced model loads it, and that of one process."""
    make, input_of, _ = MODELS[name]
    folder = Path(hvd.broadcast_object(str(tmp_path)))

    def start(sliced: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = make().double()
        if sliced:
            hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
        return model, torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)  # or it magnifies rounding

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(input_of()).square().mean().backward()
            optimizer.step()

    model, optimizer = start(True)
    steps(model, optimizer)
    plain, adam = start(False)
    steps(plain, adam)
    hvd.checkpoint.save(folder / "slices", model=model, optimizer=optimizer)
    hvd.checkpoint.save(folder / "whole", model=plain, optimizer=adam)
    steps(plain, adam)
    for sliced, where in ((False, "slices"), (True, "slices"), (True, "whole")):
        model, optimizer = start(sliced)
        hvd.checkpoint.load(folder / where, model=model, optimizer=optimizer)
        steps(model, optimizer)
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            ours = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@processes
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_all_ranks_skip_a_step_that_overflows_in_one_slice(distributed: bool) -> None:
    torch.manual_seed(0)
    model = perceptron().double()
    hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if distributed:
        alone = [hvd.new_group([rank]) for rank in range(hvd.size())][hvd.rank()]
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=alone)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(numbers(BATCH, WIDTH)).square().mean()).backward()
        if step == 0 and hvd.rank() == 0:
            gradient: Any = next(p for p in model.parameters() if isinstance(p, DTensor)).grad
            gradient.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        same = all(torch.equal(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True))
        assert same == (step == 0)


@processes
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_masks_and_weights_of_attention(batch_first: bool, average: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64))
    model = copy.deepcopy(plain)
    hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    shape = (BATCH, LENGTH, WIDTH) if batch_first else (LENGTH, BATCH, WIDTH)
    q, k = numbers(*shape), numbers(*shape, seed=2)
    padding = torch.arange(LENGTH) >= torch.tensor([[3], [4], [5]])
    masks: list[dict[str, Any]] = [
        {},
        {"attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool()},
        {"attn_mask": numbers(BATCH * HEADS, LENGTH, LENGTH)},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool()},
        {"need_weights": False, "attn_mask": numbers(LENGTH, LENGTH)},
    ]
    for options in masks:
        for ours, wanted in zip(
            model[0](q, k, k, **options, average_attn_weights=average),
            plain[0](q, k, k, **options, average_attn_weights=average),
            strict=True,
        ):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    alone = numbers(LENGTH, WIDTH)
    torch.testing.assert_close(model[0](alone, alone, alone)[0], plain[0](alone, alone, alone)[0], rtol=0, atol=1e-12)


@processes
def test_dropout_is_the_same_on_all_ranks() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(WIDTH, 36), nn.ReLU(), nn.Linear(36, WIDTH), nn.Dropout(0.5)).double()
    hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    outputs = hvd.allgather(model(numbers(BATCH, WIDTH)).detach()[None])
    assert (outputs == outputs[0]).all()
    assert (outputs == 0).any()


@processes
def test_what_the_program_chooses(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(perceptron(WIDTH), perceptron()).double()
    model[0][0].weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    plan = {"1": None, "0.0": "columns", "0.3": "rows"}
    hvd.slice_layers(model, everybody(), plan, smallest=0)  # type: ignore[arg-type]
    printed = capfd.readouterr().out
    assert ("0.0" in printed) is (hvd.rank() == 0)
    assert [isinstance(p, DTensor) for p in model[1].parameters()] == [False] * 8
    assert not model[0][0].weight.requires_grad
    x = numbers(BATCH, WIDTH)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)
    with pytest.raises(ArgumentError, match="sliced already"):
        hvd.slice_layers(model, everybody())
    with pytest.raises(ArgumentError, match=r"no layer is called 'fc\*'. There are 0, 0.0, 0.1"):
        hvd.slice_layers(plain, everybody(), {"fc*": "rows"})
    with pytest.raises(ArgumentError, match='expected "columns", "rows"'):
        hvd.slice_layers(plain, everybody(), {"0.0": "diagonals"})  # type: ignore[dict-item]
    hvd.slice_layers(plain, everybody(), {"0.0": ColwiseParallel()}, verbose=False)


@processes
def test_a_distributed_optimizer_needs_ranks_with_equal_slices() -> None:
    model = perceptron()
    hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ArgumentError, match=r'is a DTensor on a mesh with ranks 0.*process_set=grid\["dp"\]'):
        hvd.DistributedOptimizer(adam)
    with pytest.raises(ArgumentError, match="is a DTensor on a mesh with ranks 0"):
        hvd.broadcast_parameters(model.state_dict())
    with pytest.raises(UnsupportedTensorError, match=r"got a DTensor.*to_local\(\)"):
        hvd.allreduce(model[0].weight)
    mine = hvd.ProcessGrid(dp=1, tp=-1)["dp"]
    with pytest.raises(UnsupportedTensorError, match="op=Adasum needs whole parameters"):
        hvd.DistributedOptimizer(adam, op=hvd.Adasum, process_set=mine)
    muon = torch.optim.Adafactor(model.parameters())
    with pytest.raises(UnsupportedTensorError, match="Adafactor steps whole parameters"):
        hvd.DistributedOptimizer(muon, shard=True, process_set=mine)


Seen = list[torch.Tensor]


def hooked(layer: nn.Module, seen: Seen) -> nn.Module:
    """A layer with a hook of each kind, which note what they see and change it."""
    layer.note = "kept"  # type: ignore[assignment]

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(args[0].detach())
        return (args[0] * 2 if args[0].is_floating_point() else args[0] + 1, *args[1:]), kwargs

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        first = result[0] if isinstance(result, tuple) else result
        seen.append(first.detach())
        return (first * 3, *result[1:]) if isinstance(result, tuple) else first * 3

    def backward(module: nn.Module, of_inputs: Any, of_results: Any) -> Any:
        seen.extend(each.detach() for each in (*of_inputs, *of_results) if each is not None)
        return tuple(None if each is None else each * 0.5 for each in of_inputs)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)
    layer.register_full_backward_hook(backward)
    return layer


class Attending(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, x, x)[0]
        return result


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def pair(first: nn.Module | None = None, second: nn.Module | None = None, *between: nn.Module) -> nn.Module:
    return nn.Sequential(
        first or nn.Linear(WIDTH, 36), *(between or [nn.ReLU()]), second or nn.Linear(36, WIDTH), nn.Tanh()
    )


def weight_normed(layer: Any) -> Any:
    with pytest.warns(FutureWarning):  # torch has a newer form
        return nn.utils.weight_norm(layer)


def only(kind: str, layer: nn.Module) -> nn.Module:
    """A layer with one of its hooks."""
    seen: Seen = []
    hooked(layer, seen)
    for attribute in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
        if attribute != kind:
            getattr(layer, attribute).clear()
    return layer


vectors, pictures = lambda: numbers(BATCH, WIDTH), lambda: numbers(BATCH, 3, 8, 8)
CHANGED: dict[str, tuple[Callable[[Seen], nn.Module], Callable[[], torch.Tensor], str]] = {
    "hooks of a convolution": (lambda seen: nn.Sequential(hooked(nn.Conv2d(3, 12, 3), seen)), pictures, ""),
    "hooks of an embedding": (lambda seen: nn.Sequential(hooked(nn.Embedding(50, WIDTH), seen)), words, ""),
    "hooks of an attention": (
        lambda seen: Attending(hooked(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), seen)),
        lambda: numbers(BATCH, LENGTH, WIDTH),
        "",
    ),
    "what a pair is given": (lambda seen: pair(only("_forward_pre_hooks", nn.Linear(WIDTH, 36))), vectors, ""),
    "what a pair returns": (lambda seen: pair(None, only("_forward_hooks", nn.Linear(36, WIDTH))), vectors, ""),
    "hooks inside of a pair": (
        lambda seen: pair(hooked(nn.Linear(WIDTH, 36), seen)),
        vectors,
        "slices would reach its backward hook backward, forward hook after",
    ),
    "hooks of an activation": (
        lambda seen: pair(None, None, hooked(nn.ReLU(), seen)),
        vectors,
        "slices would reach its backward hook backward, forward pre-hook before, forward hook after",
    ),
    "weight_norm": (
        lambda seen: nn.Sequential(weight_normed(nn.Conv2d(3, 12, 3))),
        pictures,
        "its weight is computed from weight_g, weight_v (WeightNorm)",
    ),
    "spectral_norm": (
        lambda seen: pair(nn.utils.spectral_norm(nn.Linear(WIDTH, 36))),
        vectors,
        "its weight is computed from weight_orig, weight_u, weight_v (SpectralNorm)",
    ),
    "parametrized": (
        lambda seen: nn.Sequential(parametrizations.weight_norm(nn.Embedding(48, WIDTH))),
        words,
        "parametrized: weight",
    ),
    "pruned": (
        lambda seen: pair(None, prune.l1_unstructured(nn.Linear(36, WIDTH), "weight", 0.5)),
        vectors,
        "its weight is computed from weight_orig, weight_mask (L1Unstructured)",
    ),
}


@processes
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of an embedding
@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_program_has_done_to_a_layer_stays(kind: str) -> None:
    make, input_of, why_not = CHANGED[kind]
    ours: Seen = []
    theirs: Seen = []
    torch.manual_seed(0)
    model = make(ours).double()
    torch.manual_seed(0)
    plain = make(theirs).double()
    plan = hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    assert [entry.how for entry in plan._entries if not entry.sliced] == [why_not] * bool(why_not)
    assert any(entry.sliced for entry in plan._entries) is not bool(why_not)
    for mine, wanted in zip(train(model, input_of()), train(plain, input_of()), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)
    assert [hasattr(each, "note") for each in model.modules()] == [hasattr(each, "note") for each in plain.modules()]
    state = plan.full_state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)


@processes
def test_plans_that_cannot_be_are_refused_at_once() -> None:
    def refused(model: nn.Module, plan: Any, text: str) -> None:
        before = [type(each) for each in model.modules()]
        with pytest.raises(ArgumentError, match=text):
            hvd.slice_layers(model, everybody(), plan, verbose=False)
        assert [type(each) for each in model.modules()] == before
        assert not any(isinstance(each, DTensor) for each in model.parameters())

    n = hvd.size()
    odd = nn.Sequential(nn.Linear(WIDTH, 12 * n + 1), nn.ReLU(), nn.Linear(12 * n + 1, WIDTH), nn.Conv1d(1, 1, 1))
    text = f"plan: '0', a Linear, cannot be sliced by ColwiseParallel over ranks 0.*: its {12 * n + 1} output features"
    refused(odd, {"0": "columns", "2": "rows"}, text)
    refused(odd, {"2": "rows"}, f"plan: '2', a Linear.*its {12 * n + 1} input features are not divisible by {n}")
    refused(odd, {"3": "columns"}, "'3' is a Conv1d, and ColwiseParallel is for nn.Linear and nn.Embedding")
    seen: Seen = []
    refused(nn.Sequential(hooked(nn.Linear(WIDTH, 36), seen)), {"0": "columns"}, "slices would reach its .*hook after")
    refused(nn.Sequential(Doubled(WIDTH, 36)), {"0": "columns"}, "a Doubled, .*it has a forward pass of its own")
    refused(pair(prune.identity(nn.Linear(WIDTH, 36), "weight")), {"0": "columns"}, "computed from weight_orig")


def found(model: nn.Module, ranks: int = 2) -> list[tuple[tuple[str, ...], str]]:
    return [(each.names, each.why_not) for each in find(model, ranks, 0)]


def test_what_is_left_alone() -> None:
    tied = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False))
    tied[1].weight = tied[0].weight
    assert found(tied) == [(("0", "1"), "")]  # together
    tied[1] = Doubled(6, 8, bias=False)
    tied[1].weight = tied[0].weight
    assert found(tied) == [(("0",), "it is used in two places")]
    twice = nn.Linear(6, 6)
    assert found(nn.Sequential(twice, nn.ReLU(), twice)) == []
    assert found(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))) == [
        (("0", "1"), "width 5 is not divisible by 2 ranks")
    ]
    assert found(nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Linear(6, 6))) == []
    assert found(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6)))) == []
    (attention,) = found(nn.Sequential(nn.MultiheadAttention(6, 3)))
    assert attention[1] == "3 heads are not divisible by 2 ranks"
    assert (
        found(nn.Sequential(nn.MultiheadAttention(6, 2, kdim=4)))[0][1] == "query, key and value have different widths"
    )
    assert found(nn.Sequential(nn.Conv1d(4, 4, 3, groups=4)))[0][1] == "4 groups of channels"
    assert found(nn.Sequential(nn.Embedding(8, 6, sparse=True)))[0][1].startswith("max_norm")
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=lambda x: x.softmax(-1))
    assert ("linear1", "linear2") in dict(found(layer))
    assert dict(found(layer))["linear1", "linear2"] == "its activation may look at several elements"


def test_subclasses_are_not_taken_for_their_bases() -> None:
    class Convolution(nn.Conv2d):
        pass

    class Words(nn.Embedding):
        pass

    class Attention(nn.MultiheadAttention):
        pass

    assert found(nn.Sequential(Doubled(8, 8), nn.ReLU(), nn.Linear(8, 8))) == []
    assert found(nn.Sequential(Convolution(4, 4, 1), Words(8, 6), Attention(8, 2))) == []
    wrapped = nn.Conv2d(4, 4, 1)
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    assert found(nn.Sequential(wrapped)) == [(("0",), "its forward pass was put on the object")]


def test_pairs_do_not_overlap() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    assert [names for names, _ in found(model)] == [("0", "1"), ("2", "3")]


@processes
def test_the_gradient_of_a_gradient_is_refused() -> None:
    model = perceptron().double()
    hvd.slice_layers(model, everybody(), smallest=0, verbose=False)
    x = numbers(BATCH, WIDTH).requires_grad_()
    with pytest.raises(UnsupportedTensorError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
