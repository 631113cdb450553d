"""Reinforcement learning: each rank plays its own games, and all ranks learn from the games of all (REINFORCE).

hvdliterun -np 2 python examples/cookbook/rl.py
"""

import torch
from torch import nn

import hvdlite_torch as hvd

SIDE, MOVES = 5, 16
STEPS = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
hvd.init()
chance = torch.Generator().manual_seed(hvd.rank())  # other games on each rank


def play(policy: nn.Module, games: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk on a board from one corner to the other, in several games at once.

    Returns:
        The log-probabilities of the moves, and the rewards, both of shape (MOVES, games): -1 for each move before the goal.
    """
    places = torch.zeros(games, 2, dtype=torch.long)
    chances, rewards = [], []
    for _ in range(MOVES):
        inputs = nn.functional.one_hot(places[:, 0] * SIDE + places[:, 1], SIDE**2).float()
        logits = policy(inputs).log_softmax(1)
        moves = torch.multinomial(logits.exp(), 1, generator=chance)
        away = (places != SIDE - 1).any(1)
        chances.append(logits.gather(1, moves).squeeze(1) * away)
        rewards.append(-away.float())
        places = torch.where(away[:, None], (places + STEPS[moves.squeeze(1)]).clamp(0, SIDE - 1), places)
    return torch.stack(chances), torch.stack(rewards)


torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(SIDE**2, 32), nn.Tanh(), nn.Linear(32, 4))
hvd.broadcast_parameters(policy)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(policy.parameters(), lr=2e-2), max_grad_norm=1.0)
for _ in range(60):
    chances, rewards = play(policy, games=64 // hvd.size())
    returns = rewards.flip(0).cumsum(0).flip(0)  # what each move still leads to
    baseline = hvd.allreduce(returns.mean(1, keepdim=True))  # of the games of all ranks
    optimizer.zero_grad()
    (-(chances * (returns - baseline)).sum(0).mean()).backward()
    optimizer.step()

with torch.no_grad():
    moves = -play(policy, games=64)[1].sum(0)
moves = hvd.allreduce(moves.mean()).item()
if hvd.rank() == 0:
    print(f"moves to the goal: {moves:.2f} on average; the shortest way has {2 * (SIDE - 1)}")
