"""What a model does beyond its layers is done by its stages too, or refused: its own forward, hooks, modes, tied weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, HvdliteError
from tests.conftest import UNDER_MPI
from tests.support.processes import process_group as process_group
from tests.support.processes import processes

TOLERANCE = 1e-12


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    if UNDER_MPI:
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def layers(count: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer for _ in range(count) for layer in (nn.Linear(4, 4), nn.Tanh())]


def cuts(prefix: str = "", step: int = 2) -> list[str]:
    """The names of the layers with which the stages but the first begin."""
    return [f"{prefix}{step * number}" for number in range(1, hvd.size())]


def assert_trains_alike(model: nn.Module, x: Any, y: Any, loss: Callable[..., Any] = mse, **options: Any) -> None:
    """Train a model in stages and in one process, and compare losses, outputs and states."""
    alone, microbatches = copy.deepcopy(model), options.pop("microbatches", 2)
    pipeline = hvd.Pipeline(model, loss=loss, microbatches=microbatches, **options)
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (pipeline, alone))
    for _ in range(3):
        found = pipeline.step(x, y, ours)
        plain.zero_grad()
        expected = loss(alone(x), y)
        expected.backward()
        plain.step()
        assert found.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    state = pipeline.full_state_dict()
    assert state.keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(pipeline.eval().predict(x), alone.eval()(x), rtol=0, atol=TOLERANCE)


class Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(x - 0.5)


class Paired(nn.Module):
    """It returns a tuple, and takes one as one argument, as layers of an nn.Sequential do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Any, scale: float = 1.0) -> Any:
        first, second = pair if isinstance(pair, tuple) else (pair, pair)
        return scale * self.linear(first), second


class First(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        return pair[0] + pair[1]


@processes
def test_a_sequential_with_a_forward_of_its_own() -> None:
    x, y = numbers(8, 4), torch.zeros(8, 4)
    assert_trains_alike(Scaled(*layers()), x, y, cuts=cuts(), example=x[:4])
    with pytest.raises(ArgumentError, match="Scaled is no plain nn.Sequential.*give `example`"):
        hvd.Pipeline(Scaled(*layers()), loss=mse, cuts=cuts())


@processes
def test_layers_pass_on_tuples_as_an_nn_sequential_does() -> None:
    torch.manual_seed(0)
    x, y = numbers(8, 4), torch.zeros(8, 4)
    assert_trains_alike(nn.Sequential(*(Paired() for _ in range(6)), First()), x, y, cuts=cuts())


@processes
def test_hooks() -> None:
    x, y = numbers(8, 4), torch.zeros(8, 4)

    def ten_times(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return 10 * output

    model = nn.Sequential(*layers())
    for layer in (model[0], model[-1]):
        layer.register_forward_hook(ten_times)
    assert_trains_alike(model, x, y, cuts=cuts())  # hooks of layers stay with them
    kinds = "forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"
    for kind, told in zip(kinds, ("forward pre", "forward ", "backward pre", "backward "), strict=True):
        model = nn.Sequential(*layers())
        getattr(model, f"register_{kind}")(ten_times)
        with pytest.raises(ArgumentError, match=f"the Sequential itself has hooks .{told}-?hook .*ten_times"):
            hvd.Pipeline(model, loss=mse, cuts=cuts())
    stack = nn.LSTM(4, 4, num_layers=4, batch_first=True)
    recurrent = nn.Sequential(stack, nn.Linear(4, 4))
    options: dict[str, Any] = {"loss": mse, "chunks": 2, "cuts": cuts("0.", 1)}
    hvd.Wavefront(recurrent, **options)
    with pytest.raises(ArgumentError, match=r"got a Recurrent, which does more than call its children"):
        hvd.Wavefront(type("Recurrent", (nn.Sequential,), {"forward": First.forward})(*recurrent), **options)
    hook = recurrent.register_forward_hook(ten_times)
    with pytest.raises(ArgumentError, match="the Sequential itself has hooks"):
        hvd.Wavefront(recurrent, **options)
    hook.remove()
    stack.register_forward_hook(ten_times)
    with pytest.raises(ArgumentError, match="the layer '0' has hooks .forward hook .*ten_times"):
        hvd.Wavefront(recurrent, **options)


class Residual(nn.Module):
    """No Sequential: values cross several stages, an integer too, and layers do different things in the two modes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2 * hvd.size())
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        first = x = self.inlet(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), self.dropout, self.training)
        return x + first if scale is None else x * scale + first


@processes
def test_a_recorded_model_in_both_modes() -> None:
    x, y = numbers(8, 4), torch.zeros(8, 4)
    # In one micro-batch BatchNorm sees what it sees in one process.
    assert_trains_alike(Residual(), x, y, microbatches=1, cuts=cuts("blocks."), example=x[:4])
    pipeline = hvd.Pipeline(Residual(1.0), loss=mse, microbatches=1, cuts=cuts("blocks."), example=x[:4])
    alone = Residual(1.0)
    outputs = [pipeline.train(mode).predict(x) for mode in (True, False, True)]  # all is dropped in training
    assert [torch.equal(output, outputs[0]) for output in outputs] == [True, False, True]
    for mode, output in zip((True, False, True), outputs, strict=True):
        torch.testing.assert_close(output, alone.train(mode)(x), rtol=0, atol=TOLERANCE)


class Language(nn.Module):
    """The weight of the embedding is that of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2 * hvd.size()))
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def in_sequence() -> nn.Sequential:
    model = Language()
    return nn.Sequential(model.embedding, *model.layers, model.head)


def letters(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(5 * rows).reshape(rows, 5) % 9
    return x, x.roll(1, 1)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def assert_copies_are_equal(pipeline: Any, name: str) -> None:
    own = dict(pipeline.named_parameters()).get(name)
    copies = [copy for copy in hvd.allgather_object(own) if copy is not None]
    assert len(copies) == (2 if hvd.size() > 1 else 1)
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@processes
@pytest.mark.parametrize("make", [Language, in_sequence])
@pytest.mark.parametrize("clips", [False, True])
def test_tied_weights(make: Callable[[], nn.Module], clips: bool) -> None:
    model, alone = make(), make()
    prefix = "" if isinstance(model, nn.Sequential) else "layers."
    names = [name for name, _ in model.named_parameters()]
    options: dict[str, Any] = {"cuts": cuts(prefix)}
    for schedule in ("1f1b", "interleaved"):
        if schedule == "interleaved":
            options = {"cuts": [f"{prefix}{number}" for number in range(1, 2 * hvd.size())], "schedule": schedule}
        x, y = letters()
        model, alone = make(), make()
        pipeline = hvd.Pipeline(model, loss=cross_entropy, microbatches=2 * hvd.size(), example=x[:2], **options)
        assert {
            name for rank in hvd.allgather_object([n for n, _ in pipeline.named_parameters()]) for name in rank
        } == {*names}
        ours, plain = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (pipeline, alone))
        for _ in range(3):
            ours.zero_grad()
            plain.zero_grad()
            for rows in (slice(0, 4), slice(4, 8)):  # gradients of two batches
                pipeline.step(x[rows], y[rows])
                cross_entropy(alone(x[rows]), y[rows]).backward()
            if clips:
                norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (pipeline, alone)]
                assert norms[0].item() == pytest.approx(norms[1].item(), abs=TOLERANCE)
            ours.step()
            plain.step()
            assert_copies_are_equal(pipeline, names[0])
        state = pipeline.full_state_dict()
        assert state.keys() == alone.state_dict().keys()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE)


@processes
def test_tied_weights_that_have_come_apart() -> None:
    x, y = letters()
    pipeline = hvd.Pipeline(in_sequence(), loss=cross_entropy, cuts=cuts())
    if hvd.rank() == 0:
        with torch.no_grad():
            next(pipeline.parameters()).add_(1.0)
    with pytest.raises(HvdliteError, match="the parameter 0.weight is tied over stages on ranks 0"):
        pipeline.step(x, y)


@processes
def test_tied_weights_that_come_apart_in_one_pair_of_ranks() -> None:
    """Ranks 0 and 1 differ. The others, and they with the others, compare theirs before anybody raises."""
    shared = [nn.Linear(6, 6) for _ in range(hvd.size())]
    model = nn.Sequential(*[layer for rank in range(hvd.size()) for layer in (shared[rank - 1], shared[rank])])
    pipeline = hvd.Pipeline(model, loss=mse, cuts=[str(2 * rank) for rank in range(1, hvd.size())])
    if hvd.rank() == 0:
        with torch.no_grad():
            shared[0].weight.add_(1.0)
    with pytest.raises(HvdliteError, match="is tied over stages on ranks 0-1" if hvd.rank() < 2 else "rank"):
        pipeline.step(numbers(4, 6), numbers(4, 6))


@processes
def test_tied_weights_that_were_frozen_and_are_trained_later() -> None:
    model = in_sequence()
    model[0].weight.requires_grad_(False)
    alone = copy.deepcopy(model)
    pipeline = hvd.Pipeline(model, loss=cross_entropy, cuts=cuts())
    x, y = letters()
    for parameter in (*pipeline.parameters(), *alone.parameters()):
        parameter.requires_grad_(True)
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (pipeline, alone))
    for _ in range(2):
        pipeline.step(x, y, ours)
        plain.zero_grad()
        cross_entropy(alone(x), y).backward()
        plain.step()
    for name, value in pipeline.full_state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=TOLERANCE)


@processes
def test_a_stage_that_returns_conjugated_numbers_and_a_mean_over_the_batch() -> None:
    class Conjugated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x).conj()

    class Real(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log_softmax(x.real, -1)

    torch.manual_seed(1)
    before = [layer for _ in range(hvd.size() - 2) for layer in (nn.Linear(6, 6), nn.Tanh())]
    model = nn.Sequential(*before, nn.Linear(6, 6), Conjugated(), Real(), nn.Linear(6, 6))
    loss = nn.KLDivLoss(reduction="batchmean")
    assert_trains_alike(model, numbers(8, 6), numbers(8, 6).softmax(-1), loss, cuts=cuts())


@processes
def test_tied_weights_of_a_wavefront() -> None:
    def recurrent() -> nn.Sequential:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(9, 6), nn.Linear(6, 9)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.LSTM(6, 6, num_layers=2 * hvd.size(), batch_first=True), head)

    model, alone = recurrent(), recurrent()
    wavefront = hvd.Wavefront(model, loss=cross_entropy, chunks=2, cuts=cuts("1."))
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (wavefront, alone))
    x, y = letters()
    for _ in range(3):
        wavefront.step(x, y, ours)
        plain.zero_grad()
        cross_entropy(alone[2](alone[1](alone[0](x))[0]), y).backward()
        plain.step()
    for name, value in wavefront.full_state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=TOLERANCE)


@processes
def test_a_model_of_transformers_with_masks() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=8, n_layer=hvd.size(), n_head=2, bos_token_id=0, eos_token_id=0
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = transformers.GPT2LMHeadModel(config).double()
    alone = copy.deepcopy(model)
    ids = torch.randint(50, (7, 6), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < torch.tensor([6, 5, 4, 3, 6, 2, 1])[:, None]).long()

    def loss(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, wanted = output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten()
        return nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum"), (wanted != -100).sum()

    target = ids.masked_fill(mask == 0, -100)
    pipeline = hvd.Pipeline(
        model, loss=loss, microbatches=3, example=ids[:2], example_keywords={"attention_mask": mask[:2]}
    )
    size = sum(parameter.numel() for parameter in pipeline.parameters())
    assert size < 0.8 * sum(parameter.numel() for parameter in alone.parameters())
    ours, plain = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipeline, alone))
    for _ in range(2):
        pipeline.step(ids, target, ours, attention_mask=mask)
        plain.zero_grad()
        total, count = loss(alone(ids, attention_mask=mask), target)
        (total / count).backward()
        plain.step()
    found = pipeline.full_state_dict()
    assert found.keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    output = pipeline.eval().predict(ids, attention_mask=mask)
    assert type(output) is type(alone(ids))
    torch.testing.assert_close(output.logits, alone.eval()(ids, attention_mask=mask).logits, rtol=0, atol=1e-9)
