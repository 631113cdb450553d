"""Collectives on the memory of GPUs: the counterpart of `hvdlite.comm` for device memory.

- `nccl`: NCCL's library, called by ctypes.
- `collectives`: the collectives of a group on device memory, and those of a rank alone; `nccl_collectives`: the same by NCCL;
  `staged`: the same through host memory.
- `setup`: the ranks compare their GPUs and their NCCL, and start NCCL together.
- `groups`: the GPU of this rank, and the device collectives that each group has made.
- `abandonable`: calls of NCCL that may never return.
"""
