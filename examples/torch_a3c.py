"""Balance a pole by asynchronous advantage actor-critic (A3C): each rank plays by itself, and pushes to a parameter server.

    pip install -c constraints.txt ".[torch,examples]"
    hvdliterun -np 2 python examples/torch_a3c.py
    hvdliterun -np 4 python examples/torch_a3c.py --seed 1 --plot a3c.png

Source: Mnih et al., "Asynchronous methods for deep reinforcement learning", ICML 2016, arXiv:1602.01783. The game is
gymnasium's CartPole-v1: the pole falls after some moves, or the episode ends after 500 moves. The return of an episode is its
number of moves.

A rank plays `--moves` moves with its present policy, computes a gradient from them, pushes the gradient, and pulls the
parameters, to which the other ranks have pushed meanwhile. Nobody waits for another rank. The ranks also compare their
latest episodes, by an operation that runs while they play on. All get the same answers, so all stop at the same one: when the
mean return of the last 100 episodes, equally many of each rank, is `--goal`, or after `--seconds`. The seed decides where the
poles begin and how the networks begin; which rank pushes first depends on time, so no two runs are alike.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

EPISODES = 100
"""The number of episodes whose mean return counts."""


class Point(NamedTuple):
    """The return of an episode that has ended, or a mean return.

    Attributes:
        seconds: The time since the training began.
        updates: How many pushes of all ranks the servers had applied, as far as this rank knew.
        value: The return.
    """

    seconds: float
    updates: float
    value: float


class Trained(NamedTuple):
    """What one rank has seen of the training.

    Attributes:
        episodes: Its own episodes.
        together: The mean returns of the last `EPISODES` episodes, equally many of each rank; the same values on all ranks.
        missed: How many pushes of others a push of its own has missed on average.
        moves: How many moves it has played.
    """

    episodes: list[Point]
    together: list[Point]
    missed: float
    moves: int


class ActorCritic(nn.Module):
    """The policy, as logits of both actions, and the value of a state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


class Player:
    """Plays on one rank, and goes on where it has stopped.

    Args:
        model: The policy.
        seed: Decides where the poles begin, and the actions.
    """

    def __init__(self, model: ActorCritic, seed: int) -> None:
        self._model, self._chance = model, random.Random(seed)
        self._game: Any = gymnasium.make("CartPole-v1")
        self._state = self._game.reset(seed=seed)[0]
        self.total = 0.0
        self.ended: list[float] = []
        """The returns of the episodes that have ended since the caller has last emptied this list."""

    def play(self, moves: int, discount: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Play.

        Returns:
            The states (moves, 4), the actions (moves,), and the discounted sums of rewards from each state on (moves,). Where
            an episode was not seen to its end, or ended only because of its 500 moves, the critic's value stands for the rest.
        """
        states, actions, rewards, nexts, ends, lives = [], [], [], [], [], []
        for _ in range(moves):
            state = torch.from_numpy(self._state)
            with torch.no_grad():
                right = float(torch.sigmoid((logits := self._model.actor(state))[1] - logits[0]))
            action = int(self._chance.random() < right)
            self._state, reward, fell, over, _ = self._game.step(action)
            self.total += reward
            states.append(state)
            actions.append(action)
            rewards.append(reward)
            nexts.append(torch.from_numpy(self._state))
            ends.append(fell or over)
            lives.append(not fell)
            if fell or over:
                self.ended.append(self.total)
                self.total, self._state = 0.0, self._game.reset()[0]
        with torch.no_grad():
            values = self._model.critic(torch.stack(nexts)).squeeze(1).tolist()
        sums, later = [0.0] * moves, 0.0
        for n in reversed(range(moves)):
            if ends[n] or n == moves - 1:
                later = values[n] if lives[n] else 0.0
            later = sums[n] = rewards[n] + discount * later
        return torch.stack(states), torch.tensor(actions), torch.tensor(sums)


def loss_of(
    model: ActorCritic, states: torch.Tensor, actions: torch.Tensor, sums: torch.Tensor, entropy: float
) -> torch.Tensor:
    """Return the loss of A3C: of the actor with a bonus for the policy's entropy, and of the critic."""
    values = model.critic(states).squeeze(1)
    policy = torch.distributions.Categorical(logits=model.actor(states))
    advantages = sums - values.detach()
    actor = -(policy.log_prob(actions) * advantages).mean() - entropy * policy.entropy().mean()
    return actor + 0.5 * F.mse_loss(values, sums)


def train(arguments: argparse.Namespace) -> Trained:
    """Train. Every rank calls this."""
    torch.manual_seed(arguments.seed)
    model = ActorCritic()
    player = Player(model, seed=1000 * arguments.seed + hvd.rank())
    adam = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    optimizer = hvd.AsyncDistributedOptimizer(adam, model, mode="async")
    own = -(-EPISODES // hvd.size())
    recent: deque[float] = deque(maxlen=own)
    episodes: list[Point] = []
    together: list[Point] = []
    moves, asked, goes_on = 0, None, True
    hvd.barrier()
    begin = time.perf_counter()
    with tqdm(total=arguments.goal, unit=" return", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        while goes_on:
            loss = loss_of(model, *player.play(arguments.moves, arguments.discount), arguments.entropy)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()  # push, pull
            moves += arguments.moves
            seconds, updates = time.perf_counter() - begin, optimizer.pushes * (1 + optimizer.mean_delay)
            episodes += [Point(seconds, updates, value) for value in player.ended]
            recent.extend(player.ended)
            player.ended.clear()
            if (
                asked is None
            ):  # all ranks ask the same questions in the same order, and play on until they hear the answer
                said = torch.tensor([sum(recent), len(recent), float(seconds > arguments.seconds)])
                asked = hvd.allreduce_async(said, op=hvd.Sum, name="returns")
            elif hvd.poll(asked):
                total, count, late = hvd.synchronize(asked).tolist()
                asked, goes_on = None, not late
                if count == own * hvd.size():
                    together.append(Point(seconds, updates, total / count))
                    goes_on = goes_on and total / count < arguments.goal
                    progress.n = min(total / count, arguments.goal)
                    progress.set_postfix(updates=f"{updates:.0f}", refresh=False)
                    progress.update(0)
    optimizer.finish()
    return Trained(episodes, together, optimizer.mean_delay, moves)


def means(episodes: list[Point], over: int) -> list[Point]:
    """Return the mean returns of the last `over` episodes, from the first on that has so many before it."""
    found, held = [], 0.0
    for n, episode in enumerate(episodes):
        held += episode.value - (episodes[n - over].value if n >= over else 0.0)
        if n >= over - 1:
            found.append(episode._replace(value=held / over))
    return found


def draw(runs: list[Trained], path: Path) -> None:
    """Draw the learning curve by time and by updates: thin for each rank, thick for all together."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, both = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    curves = [(f"rank {rank}", means(run.episodes, -(-EPISODES // len(runs)))) for rank, run in enumerate(runs)]
    for axes, what, label in zip(both, ("seconds", "updates"), ("seconds of training", "updates"), strict=True):
        for name, curve in [*curves, ("together", runs[0].together)]:
            style = {"color": "black", "linewidth": 1.6} if name == "together" else {"linewidth": 0.8, "alpha": 0.7}
            axes.plot([getattr(each, what) for each in curve], [each.value for each in curve], label=name, **style)
        axes.axhline(475, color="#777777", linestyle="--", linewidth=1)
        axes.set(xlabel=label, ylim=(0, 510))
        axes.grid(True, color="#dddddd", linewidth=0.6)
    both[0].set_ylabel(f"mean return of the last {EPISODES} episodes")
    both[0].legend(frameon=False)
    picture.suptitle(f"A3C on CartPole-v1, {len(runs)} ranks")
    picture.savefig(path, dpi=120)
    plt.close(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="the limit of the training (120)")
    parser.add_argument(
        "--goal", type=float, default=475.0, help=f"the mean return of {EPISODES} episodes to reach (475)"
    )
    parser.add_argument("--moves", type=int, default=32, help="from one push to the next (32)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--entropy", type=float, default=0.01, help="the weight of the policy's entropy (0.01)")
    parser.add_argument("--max-grad-norm", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curve, by time and by updates")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")
    if arguments.moves < 1:
        parser.error(f"--moves {arguments.moves}: expected 1 or more")

    hvd.init()
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    torch.set_num_threads(1)  # a move is too short for several
    runs: list[Trained] = hvd.allgather_object(train(arguments))
    if hvd.rank() != 0:
        return
    together = runs[0].together
    for goal in sorted({195.0, arguments.goal}):
        reached = next((each for each in together if each.value >= goal), None)
        when = "not reached" if reached is None else f"after {reached.seconds:.0f} s and {reached.updates:.0f} updates"
        print(f"mean return of {EPISODES} episodes at least {goal:g}: {when}")
    print(
        f"seed {arguments.seed}, {len(runs)} ranks: {sum(len(run.episodes) for run in runs)} episodes, "
        f"{sum(run.moves for run in runs)} moves; the last mean return is {together[-1].value if together else 0:.1f}; "
        f"a push has missed {sum(run.missed for run in runs) / len(runs):.2f} pushes of others on average"
    )
    if arguments.plot:
        draw(runs, arguments.plot)
        print(f"the learning curve is in {arguments.plot}")


if __name__ == "__main__":
    main()
