"""Models as they are written, of programs and of Hugging Face's transformers, in slices: they train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd
from hvdlite_torch.slicing.rules import find
from tests.support.processes import process_group as process_group
from tests.support.processes import processes

WIDTH, HEADS, WORDS = 96, 12, 101


def gpt2(way: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "vocab_size": WORDS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_implementation=way, bos_token_id=0, eos_token_id=0))


def sizes(way: str, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "intermediate_size": 4 * WIDTH,
        "attn_implementation": way,
        **others,
    }


def bert(way: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes(way, vocab_size=WORDS, max_position_embeddings=16, **none)))


def vit(way: str) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**sizes(way, image_size=8, patch_size=4, num_labels=4)))


def llama(way: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes(way, vocab_size=WORDS, num_key_value_heads=6, pad_token_id=0)))


def batch(name: str, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        pictures = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pictures[rows], "labels": torch.arange(4)[rows]}
    words = torch.randint(1, WORDS, (4, 7), generator=generator)
    words[1, 5:] = 0  # padding, which nothing is learned from
    labels = words.masked_fill(words == 0, -100)
    return {"input_ids": words[rows], "attention_mask": (words != 0).long()[rows], "labels": labels[rows]}


MODELS: dict[str, Callable[[str], nn.Module]] = {"gpt2": gpt2, "bert": bert, "vit": vit, "llama": llama}


def pair_of(name: str, way: str) -> tuple[Any, Any]:
    """A model, and one like it that will stay whole."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = MODELS[name](way).double()
    return model, copy.deepcopy(model)


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@processes
@pytest.mark.parametrize(("name", "way"), [*((name, "sdpa") for name in MODELS), ("gpt2", "eager"), ("bert", "eager")])
def test_a_model_of_transformers_is_sliced_as_it_is(name: str, way: str) -> None:
    model, plain = pair_of(name, way)
    start = copy.deepcopy(plain.state_dict())
    plan = hvd.slice_layers(model, hvd.global_process_set, smallest=0, verbose=False)
    assert [entry for entry in plan._entries if not entry.sliced] == []
    sliced, total = plan._parameters
    assert sliced > 0.95 * total
    options = {"output_hidden_states": True, "output_attentions": way == "eager"}
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, plain)]
    for _ in range(3):
        ours, theirs = (each(**batch(name), **options) for each in (model, plain))
        assert_close(ours.logits, theirs.logits)
        assert_close(ours.hidden_states, theirs.hidden_states)
        assert_close(ours.get("attentions"), theirs.get("attentions"))
        for result, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
    whole = plan.full_state_dict()
    assert whole.keys() == start.keys()
    for key, value in plain.state_dict().items():
        assert_close(whole[key], value)
    assert sum(not torch.equal(value, start[key]) for key, value in whole.items()) > 0.9 * len(
        whole
    )  # they have learned
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert_close(model(**batch(name)).logits, plain(**batch(name)).logits)


@processes
def test_a_language_model_goes_on_with_a_text() -> None:
    """The cache of keys and values has this rank's heads."""
    model, plain = pair_of("gpt2", "sdpa")
    hvd.slice_layers(model, hvd.global_process_set, smallest=0, verbose=False)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    start = batch("gpt2", slice(1))["input_ids"]
    assert torch.equal(model.eval().generate(start, **options), plain.eval().generate(start, **options))


@processes
@pytest.mark.parametrize("shard", [False, True])
def test_a_grid_of_slices_and_batches(shard: bool) -> None:
    size = hvd.size()
    grid = hvd.ProcessGrid(dp=2 if size % 2 == 0 and size > 2 else 1, tp=-1)
    model, plain = pair_of("gpt2", "sdpa")
    plan = hvd.slice_layers(model, grid["tp"], smallest=0, verbose=False)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(adam, model, process_set=grid["dp"], shard=shard, max_grad_norm=0.5)
    alone = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    share = slice(None)
    if grid.axes["dp"] == 2:  # rows without padding, so that each half has as many words
        share = slice(2, 3) if grid.place["dp"] == 0 else slice(3, 4)
    whole = slice(2, 4) if grid.axes["dp"] == 2 else slice(None)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch("gpt2", share)).loss.backward()
        optimizer.step()
        alone.zero_grad()
        plain(**batch("gpt2", whole)).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        alone.step()
    state = plan.full_state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-8)


def whys(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    return {name: each.why_not for each in find(model, ranks, 0) for name in each.names}


def test_what_is_not_known_of_a_model_is_left_alone() -> None:
    models = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")

    class Other(models.GPT2Attention):  # type: ignore[name-defined, misc]
        def forward(self, hidden_states: Any, **options: Any) -> Any:
            result, weights = super().forward(hidden_states, **options)
            return result.flip(0), weights

    model: Any = gpt2("sdpa")
    assert set(whys(model).values()) == {""}
    model.transformer.h[0].attn.__class__ = Other
    model.transformer.h[1].attn.config = copy.copy(model.config)
    model.transformer.h[1].attn.config._attn_implementation = "flash_attention_2"
    model.transformer.h[1].mlp.act.register_forward_hook(lambda *_: None)
    found = whys(model)
    assert found["transformer.h.0.attn.c_attn"] == "what its forward pass does between them is not known: say a plan"
    assert found["transformer.h.0.mlp.c_fc"] == ""
    assert "attention by 'flash_attention_2' is not known" in found["transformer.h.1.attn.c_attn"]
    assert "slices would reach its forward hook" in found["transformer.h.1.mlp.c_fc"]
    assert "12 heads are not divisible by 8 ranks" in whys(gpt2("sdpa"), 8)["transformer.h.0.attn.c_attn"]
    layer: Any = bert("sdpa").bert.encoder.layer[0]
    layer.attention.self.register_forward_hook(lambda *_: None)
    assert "slices would reach" in whys(layer)["attention.self.query"]
    layer.intermediate.intermediate_act_fn = nn.Softmax(-1)
    assert whys(layer)["intermediate.dense"] == "its activation may look at several elements"


class Layers(nn.Module):
    """Layers whose forward passes are below."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 12), nn.Linear(4, 12), nn.Linear(12, 4)
        self.act, self.drop, self.norm, self.scale = nn.SiLU(), nn.Dropout(0.0), nn.LayerNorm(4), 2.0


class Gated(Layers):
    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Steps(Layers):
    def forward(self, x: Any) -> Any:
        """With a docstring."""
        h = F.relu(self.up(x)) * self.scale + 1.0
        h = self.drop(h)
        y: Any = self.down(h)
        return self.norm(y + x) * self.scale


class SeesTheMiddle(Layers):
    def forward(self, x: Any) -> Any:
        h = self.up(x)
        return self.down(F.relu(h)) + h.mean()


class Softmax(Layers):
    def forward(self, x: Any) -> Any:
        return self.down(F.softmax(self.up(x), -1))


class Helped(Layers):
    def helper(self, x: Any) -> Any:
        return self.up(x).mean()

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        return self.down(h) + self.helper(x)


class Branches(Layers):
    def forward(self, x: Any) -> Any:
        h = self.up(x)
        if self.training:
            h = h * h.max()
        return self.down(h)


class ReadsAWeight(Layers):
    def forward(self, x: Any) -> Any:
        return self.down(F.relu(self.up(x))) * self.up.weight.sum()


class AddsWhole(Layers):
    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)) + x.sum(-1, keepdim=True))


class Shadows(Layers):
    def forward(self, x: Any) -> Any:
        h = self.up(x)  # noqa: F841  # another h is below
        return [self.down(h) for h in x]


class Twice(Layers):
    def forward(self, x: Any) -> Any:
        return self.down(self.up(x)) + self.down(self.gate(x))


class InPlace(Layers):
    def forward(self, x: Any) -> Any:
        h = self.up(x)
        h += h.mean()
        return self.down(h)


@pytest.mark.parametrize("cls", [Gated, Steps])
def test_pairs_in_the_code_of_a_forward_pass(cls: type[nn.Module]) -> None:
    pairs = {name: each.why_not for each in find(cls(), 2, 0) if each.kind == "pair" for name in each.names}
    assert pairs == {"down": "", **({"gate": "", "up": ""} if cls is Gated else {"up": ""})}


@pytest.mark.parametrize(
    "cls", [SeesTheMiddle, Softmax, Helped, Branches, ReadsAWeight, AddsWhole, Shadows, Twice, InPlace]
)
def test_forward_passes_that_need_whole_tensors(cls: type[nn.Module]) -> None:
    assert [each.kind for each in find(cls(), 2, 0)] == ["unknown"]


@processes
@pytest.mark.parametrize("cls", [Gated, Steps])
def test_models_of_a_program_train_as_whole_ones(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = cls().double()
    plain = copy.deepcopy(model)
    plan = hvd.slice_layers(model, hvd.global_process_set, smallest=0, verbose=False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
        assert_close(model(x), plain(x))
    assert plan._parameters[0] > 0


@processes
def test_embeddings_by_rows() -> None:
    """Uneven rows, ranks without rows, padding, and numbers that are no row."""
    for rows, padding in ((2 * hvd.size() + 1, None), (hvd.size() + 1, 1), (1, None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, 6, padding_idx=padding, dtype=torch.float64))
        plain = copy.deepcopy(model)
        hvd.slice_layers(model, hvd.global_process_set, smallest=0, verbose=False)
        numbers = torch.arange(8).view(2, 4) % rows
        for each in (model, plain):
            each(numbers).square().sum().backward()
        assert_close(model(numbers), plain(numbers))
        (ours,), (theirs,) = model.parameters(), plain.parameters()
        assert ours.grad is not None
        assert_close(ours.grad.full_tensor(), theirs.grad)
        for wrong in (rows, -1):
            with pytest.raises(IndexError, match="out of range"):
                model(torch.tensor([wrong]))
