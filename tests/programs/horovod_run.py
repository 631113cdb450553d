"""Run a function on several ranks, as users wrote it for Horovod."""

import horovod


def train(factor: int) -> tuple[int, int, float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor(float(factor * hvd.rank())), op=hvd.Sum).item()


if __name__ == "__main__":
    print(horovod.run(train, args=(10,), np=2, hosts="localhost:2", use_mpi=True, verbose=0))
