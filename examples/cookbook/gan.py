"""Train a generative adversarial network (GAN): two models, each with a distributed optimizer of its own.

hvdliterun -np 2 python examples/cookbook/gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

hvd.init()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 2))
critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
hvd.broadcast_parameters(generator)
hvd.broadcast_parameters(critic)
of_generator = hvd.DistributedOptimizer(torch.optim.Adam(generator.parameters(), lr=1.5e-3, betas=(0.5, 0.9)))
of_critic = hvd.DistributedOptimizer(torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9)))
chance = torch.Generator().manual_seed(hvd.rank())  # each rank draws its own points
batch = 128 // hvd.size()


def real() -> torch.Tensor:
    """Points of a circle of radius 2 (batch, 2), which the generator learns to draw."""
    angle = 6.2848 * torch.rand(batch, generator=chance)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch, 2, generator=chance)


def fake() -> torch.Tensor:
    return generator(torch.randn(batch, 4, generator=chance))


for _ in range(700):
    of_critic.zero_grad()
    with torch.no_grad():
        drawn = fake()
    (F.softplus(-critic(real())) + F.softplus(critic(drawn))).mean().backward()
    of_critic.step()

    of_generator.zero_grad()
    F.softplus(-critic(fake())).mean().backward()  # the critic's gradients are dropped by the next zero_grad
    of_generator.step()

with torch.no_grad():
    radius = fake().norm(dim=1)
radius = hvd.allgather(radius)
if hvd.rank() == 0:
    print(f"radius of the points that are drawn: {radius.mean():.2f} ± {radius.std():.2f}; that of the data is 2")
