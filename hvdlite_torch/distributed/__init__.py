"""The backend "hvdlite" of torch.distributed: DDP, FSDP, DTensor and pipelines of torch over hvdlite's collectives.

As soon as `hvdlite_torch` is imported, ``torch.distributed.init_process_group("hvdlite")`` works under hvdliterun, mpirun and
srun.

- `backend`: enters the backend in torch, and makes process groups.
- `grid`: `ProcessGrid` as a `DeviceMesh`.
- `rendezvous`: how the ranks find each other's store without MASTER_ADDR.
- `process_group`: the collectives and messages of one group, under the names that torch calls.
- `group_and_backend`: what else torch asks of a group.
- `operands`: tensors as flat arrays, and torch's reductions.
- `work`: what torch waits for.
"""
