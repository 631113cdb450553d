"""Stages of a recorded model, run one after the other in this process, do what the model does, or are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hvdlite.errors import ArgumentError
from hvdlite_torch.pipeline.stages import candidates, traced_stages
from hvdlite_torch.pipeline.traced import Inputs


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Chain(nn.Module):
    """The stages of a model in this process."""

    def __init__(self, model: nn.Module, cuts: list[str], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleList(traced_stages(model, cuts, Inputs(args, kwargs)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.stages
        values = first(*args, **kwargs)
        for stage in others:
            values = stage(*values)
        return values

    def whole(self) -> dict[str, Any]:
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)
        )
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.blocks[0][1].weight
        self.spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.unused = nn.Linear(3, 3)
        self.average = nn.Buffer(torch.zeros(4))
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> dict[str, Any]:
        x = self.norm(x)
        with torch.no_grad():
            mean = x.mean(1, keepdim=True)
            self.average.lerp_(x.mean(0), 0.1)
        part = x[:, :2]
        for block in self.blocks:
            x = block(x) + mean
        x = F.dropout(self.lstm(x[:, None])[0][:, 0], 0.1, self.training)
        x = self.spectral(self.tied(self.head(x))) * self.scale + torch.tensor([1.0, 2, 3, 4]) + shift
        return {"out": x, "number": 3, "none": None, "part": [part * 2], "mode": self.training}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
def test_stages_do_what_the_model_does_in_both_modes() -> None:
    model, alone = Everything(), Everything()
    alone.load_state_dict(model.state_dict())
    chain = Chain(model, ["blocks.1", "head"], torch.ones(1, 4), shift=0.5)
    hooks = [0]
    model.head.bias.register_hook(lambda _: hooks.append(1))  # the parameters are those of the model
    for mode in (True, False):
        chain.train(mode)
        alone.train(mode)
        for rows in (2, 5) if mode else (1, 3):
            x = torch.randn(rows, 4)
            outputs = []
            for each in (chain, alone):
                torch.manual_seed(rows)
                outputs.append(each(x, shift=0.5))
                outputs[-1]["out"].square().sum().backward()
            assert outputs[0].keys() == outputs[1].keys()
            torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
        assert chain.whole().keys() == alone.state_dict().keys()
        torch.testing.assert_close(chain.whole(), dict(alone.state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(gradients(model), gradients(alone), rtol=1e-12, atol=1e-12)
    assert len(hooks) == 5


def test_modules_stay_in_their_modes() -> None:
    """A layer that is frozen by `eval`, alone or by a method of the model's own."""

    class Model(Scaled):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[1].eval()
            return self

    for model, frozen in ((Scaled(*norms()), [False]), (Model(*norms()), [True, True])):
        model[1].eval()
        chain, alone = Chain(model, ["2"], torch.ones(3, 4)), copy.deepcopy(model)
        for number in range(2):
            x = torch.randn(5, 4)
            torch.testing.assert_close(chain(x), alone(x), rtol=0, atol=0)
            torch.testing.assert_close(chain.whole(), dict(alone.state_dict()), rtol=0, atol=0)
            assert bool(chain.whole()["1.num_batches_tracked"] == 0) is (number == 0 or frozen[-1])
            chain.train()
            alone.train()
        assert model[0].training and not model[1].training


class Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def norms() -> list[nn.Module]:
    return [layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))]


class Straight(torch.autograd.Function):
    """Rounds; the gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


straight = Straight.apply  # as programs do, long before a pipeline is made


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.kind, self.calls = nn.BatchNorm1d(4, affine=False), kind, 0
        self.seen: Any = {"list": [], "tensor": torch.zeros(()), "in place": torch.zeros(())}.get(kind)
        self.layers.append(nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "function":
            x = Straight.apply(x)
        if self.kind == "bound function":
            return self.layers[1](straight(self.layers[0](x)))
        x = self.norm(self.layers[0](x))
        if self.kind == "tensor hook":
            x.register_hook(lambda gradient: -gradient)
        if self.kind == "node's hook":
            x.grad_fn.register_hook(lambda inputs, outputs: None)
        if self.kind == "node's prehook":
            x.grad_fn.register_prehook(lambda gradients: tuple(-gradient for gradient in gradients))
        if self.kind == "counter":
            self.calls += 1
        if self.kind in ("none", "tensor"):
            self.seen = x.mean()
        if self.kind == "list":
            self.seen.append(x.mean())
        if self.kind == "in place":
            self.seen.add_(1)
        if self.kind == "random" and random.random() < 2:
            x = 2 * x
        if self.kind == "data" and x.sum() > 0:
            x = -x
        if self.kind == "views":
            view, x = x[:, :2], self.layers[1](torch.zeros(3, 4)) + x.relu_()
            return x + view.sum()
        x = self.layers[3](self.layers[2](self.layers[1](x)))
        return self.norm(x) if self.kind == "shared" else x


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("function", "uses Straight, an autograd.Function with a gradient of its own"),
        ("bound function", "uses Straight, an autograd.Function with a gradient of its own"),
        ("tensor hook", "registers the hook Odd.forward.*for a tensor"),
        *((f"node's {hook}", "registers a hook for the node .*Backward") for hook in ("hook", "prehook")),
        ("counter", "the forward pass changes 'calls'"),
        *((kind, "the forward pass changes 'seen'") for kind in ("none", "tensor", "list", "in place")),
        ("random", "the forward pass draws random numbers of Python"),
        ("data", "Odd cannot be split automatically.*data"),
        ("views", "changes in place what it gets from the stage before .*views of the same memory"),
        ("shared", r"stages \[0, 1\] use norm.num_batches_tracked, and the forward pass changes it"),
    ],
)
def test_what_would_be_left_out_is_refused(kind: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        Chain(Odd(kind), ["layers.1"], torch.ones(3, 4))


def test_hooks_within_a_recorded_model_are_refused() -> None:
    for kind in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        model = Odd("")
        getattr(model.layers[1], f"register_{kind}")(lambda *_: None)
        with pytest.raises(ArgumentError, match=r"the layer 'layers.1' has hooks \((for|back)ward .*lambda"):
            Chain(model, ["layers.1"], torch.ones(3, 4))


def test_wrong_cuts_and_inputs() -> None:
    for cuts, told in (
        (["layers.3"], "the layer 'layers.3' does not compute anything"),
        (["layers.2", "layers.1"], "the layer 'layers.1' runs before 'layers.2'"),
    ):
        with pytest.raises(ArgumentError, match=told):
            Chain(Odd(""), cuts, torch.ones(3, 4))
    chain = Chain(Odd(""), ["layers.1"], torch.ones(3, 4))
    with pytest.raises(ArgumentError, match=r"made it depend on this: .*4"):
        chain(torch.ones(3, 5))
    with pytest.raises(ArgumentError, match=r"keywords \['mask'\], but `example` has 1 and \[\]"):
        chain(torch.ones(3, 4), mask=torch.ones(3))
    chain.stages[0].eval()
    with pytest.raises(ArgumentError, match="a stage got 2 values"):
        chain.stages[1](torch.ones(3), torch.ones(3))


def hugging_face() -> Iterator[tuple[Any, str, Any, Any]]:
    """Models with random weights, the list of their layers, and functions that make inputs of some rows and length."""
    transformers = pytest.importorskip("transformers")
    small = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}

    def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(50, (rows, length), generator=generator)
        return {"input_ids": ids, "attention_mask": (torch.arange(length) < torch.arange(1, rows + 1)[:, None]).long()}

    def pixels(rows: int, length: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))}

    gpt2 = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    bert = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **small)
    vit = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **small)
    yield transformers.GPT2LMHeadModel(gpt2), "transformer.h", tokens, "logits"
    yield transformers.BertForSequenceClassification(bert), "bert.encoder.layer", tokens, "logits"
    yield transformers.ViTForImageClassification(vit), "vit.layers", pixels, "logits"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_of_transformers() -> None:
    for model, layers, inputs, _ in hugging_face():
        alone = copy.deepcopy(model).double()
        names = list(candidates(model.double()))
        assert names == [f"{layers}.{number}" for number in range(2)]
        chain = Chain(model, names[1:], **inputs(2, 5))
        sizes = [sum(p.numel() for p in stage.parameters()) for stage in chain.stages]
        assert max(sizes) < 0.8 * sum(p.numel() for p in alone.parameters())
        for rows, length in ((3, 7), (1, 5)):
            given = inputs(rows, length)
            outputs = []
            for each in (chain, alone):
                torch.manual_seed(rows)
                outputs.append(each(**given))
                outputs[-1].logits.square().sum().backward()
            assert type(outputs[0]) is type(outputs[1])
            torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradients(model), gradients(alone), rtol=1e-10, atol=1e-10)
        assert chain.whole().keys() == alone.state_dict().keys()
