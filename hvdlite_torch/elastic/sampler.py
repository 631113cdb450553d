"""`ElasticSampler`: each sample of an epoch once, also if the number of ranks changes in the middle."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

import hvdlite


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of the samples of an epoch that no rank has seen yet. Pass it to a ``DataLoader``.

    A program calls `record_batch` after each batch, and has the sampler in its state (`TorchState`). When the training goes on
    with another number of ranks, the samples that were seen before the last commit do not come again in this epoch.

    The order of an epoch is the same on all ranks. Ranks take its samples in turn. If their number is no multiple of the number
    of ranks, the first ones come once more in the end, so that all ranks have the same number of batches.

    Args:
        dataset: The samples: anything that has a length.
        shuffle: Whether the order is random, and another in each epoch.
        seed: The seed of the order; the same on all ranks.
        pad: Whether samples are repeated so that all ranks have as many. If not, each comes exactly once, and some ranks have
            one less: put the loop into ``with hvd.uneven():``.

    Attributes:
        dataset, shuffle, seed: The arguments.
        epoch: The number of the epoch.
        indices: This rank's share of the samples that are left, in the order in which they come.
        num_replicas, rank: The number of ranks, and the number of this one, at the last `reset`.
        num_samples: The length of `indices`.

    Examples:
        >>> on_ranks(2, lambda: list(hvd.elastic.ElasticSampler(range(5), shuffle=False)))
        [[0, 2, 4], [1, 3, 0]]
        >>> def left():
        ...     sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
        ...     sampler.record_batch(0, 1)  # each rank has trained with one sample
        ...     sampler.load_state_dict(sampler.gathered())  # as a new process does
        ...     return list(sampler)
        >>> on_ranks(2, left)
        [[2, 4], [3, 5]]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, pad: bool = True) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.indices: list[int] = []
        self.num_replicas = self.rank = self.num_samples = 0
        self._pad = pad
        self._seen = np.zeros(len(dataset), bool)
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """The samples of this epoch that have been seen, as far as this rank knows."""
        return set(np.flatnonzero(self._seen).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no sample has been seen; or go on with it, if it is the present one. All ranks call this.

        So it may be called at the end of an epoch for the next one, as in Horovod, or at the beginning of each.

        Args:
            epoch: The number of the epoch.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._seen[:] = False
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has trained with a batch.

        Args:
            batch_idx: The number of the batch since the ``DataLoader`` began, from 0 on.
            batch_size: The size of the batches of the ``DataLoader``.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has trained with some samples.

        Args:
            indices: Their places in the dataset.
        """
        self._seen[np.fromiter(indices, np.int64)] = True

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch. See `record_batch` for the arguments."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the samples that this rank has seen in it, or knows to have been seen.

        `gathered` returns what all ranks have seen.
        """
        return {"epoch": self.epoch, "processed_indices": np.flatnonzero(self._seen)}

    def gathered(self) -> dict[str, Any]:
        """Return rank 0's epoch, and the samples that any rank has seen in it. Every rank calls this."""
        told = hvdlite.allgather_object(self.state_dict(), "the samples that ElasticSampler has seen")
        mine = [each["processed_indices"] for each in told if each["epoch"] == told[0]["epoch"]]
        return {"epoch": told[0]["epoch"], "processed_indices": np.unique(np.concatenate(mine))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in an epoch. All ranks call this with the same state.

        Args:
            state_dict: What `state_dict` or `gathered` has returned.
        """
        self.epoch = state_dict["epoch"]
        self._seen[:] = False
        self.record_indices(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deal out the samples that are left to the ranks that are there now. All ranks must know the same samples as seen."""
        self.num_replicas, self.rank = hvdlite.size(), hvdlite.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = [index for index in order if not self._seen[index]]
        own = left[self.rank :: self.num_replicas]
        repeated = len(own) * self.num_replicas + self.rank - len(left)
        if self._pad and left and repeated < -len(left) % self.num_replicas:
            own.append(left[repeated % len(left)])
        self.indices, self.num_samples = own, len(own)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
