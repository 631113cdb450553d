"""Fine-tune a small transformer by LoRA (arXiv:2106.09685): only the small matrices are trained, and exchanged.

hvdliterun -np 2 python examples/cookbook/lora.py
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

import hvdlite_torch as hvd

hvd.init()
torch.manual_seed(0)
text = " ".join(topics.values()).encode("ascii", "replace")[: 4000 * 32]


class Lora(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(8, columns) / 8)
        self.up = nn.Parameter(torch.zeros(rows, 8))  # so the model begins as it was

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def loss_of(model: nn.ModuleDict, rows: torch.Tensor) -> torch.Tensor:
    x = model["bytes"](rows[:, :-1]) + model["places"].weight
    for block in model["blocks"]:  # attention of 4 heads, and two layers
        heads = block["attention"](block["norm"](x)).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + block["down"](F.gelu(block["up"](x)))
    return F.cross_entropy(model["out"](x).flatten(0, 1), rows[:, 1:].flatten())


def train(model: nn.ModuleDict, text: bytes) -> str:
    hvd.broadcast_parameters(model)
    rows, chance, losses = torch.tensor(list(text)).reshape(-1, 32), torch.Generator().manual_seed(0), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(trained, lr=5e-3))
    for _ in range(100):
        mine = torch.randint(len(rows), (32,), generator=chance)[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        optimizer.set_batch_weight(len(mine))
        loss = loss_of(model, rows[mine])
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    return f"{sum(p.numel() for p in trained)} parameters, loss {losses[0]:.3f} to {losses[-1]:.3f}"


sizes = {"attention": (64, 192), "up": (64, 128), "down": (128, 64)}
blocks = [nn.ModuleDict({"norm": nn.LayerNorm(64), **{n: nn.Linear(*s) for n, s in sizes.items()}}) for _ in range(2)]
model = nn.ModuleDict({"bytes": nn.Embedding(256, 64), "places": nn.Embedding(31, 64)})
model.update({"blocks": nn.ModuleList(blocks), "out": nn.Linear(64, 256)})
first = train(model, text.lower())  # a model as others have trained it
model.requires_grad_(False)
for layer in [module for module in model["blocks"].modules() if isinstance(module, nn.Linear)]:
    register_parametrization(layer, "weight", Lora(*layer.weight.shape))
second = train(model, text.upper())
if hvd.rank() == 0:
    print(f"in small letters: {first}\nLoRA, in capitals: {second}")
