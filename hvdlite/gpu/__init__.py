"""What `hvdlite.comm` does, on the memory of GPUs.

- `nccl`: NCCL's library, by ctypes.
- `collectives`: what all ranks of a group do on device memory. `nccl_collectives`: by NCCL; `staged`: through host memory.
- `setup`: whether all ranks can have them; `groups`: which ranks have made theirs.
- `abandonable`: calls of NCCL that may never return.
"""
