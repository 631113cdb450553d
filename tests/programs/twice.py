"""Every rank fails at the same time."""

from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
raise KeyError(f"rank {MPI.COMM_WORLD.rank}")
