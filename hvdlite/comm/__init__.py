"""Transports and collectives. Each module is imported only where it is used: MPI starts when `mpi` is imported."""
