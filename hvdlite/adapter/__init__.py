"""The parts that the adapters for frameworks share.

- `arguments`: converts Horovod's arguments to those of hvdlite.
- `capabilities`: the libraries that hvdlite can use here (MPI, NCCL, …).
- `distributed_gradient`, `tree`: `hvdlite.DistributedGradient`, for NumPy, JAX and programs without a framework.
- `plain`: the names of `hvdlite` itself.
- `rows`: which rows belong to which rank, for the gradients of allgather and reducescatter.
- `pipeline`: schedules, messages and weights of micro-batches, in a folder of its own.
- `options`: the options of a gradient exchange.
- `array_sync`, `eager_sync`: exchange gradients as arrays of any framework; `tables`: those that are rows of a table;
  `buckets`: the exchange in host memory and on a device; `gradient_memory`: keeps the buckets of each layout.
- `sharded`: each rank steps its shard of the parameters, in frameworks whose tensors never change.
- `few_bytes`: what sends fewer bytes, in a folder of its own.
- `identity`: matches the optimizers of different ranks; `agreement`: the ranks of a process set that agree.
- `joining/`: what the ranks find out about each other's optimizers when all have joined.
- `advice`: warns of silent mistakes in the first steps.
- `guide`: the error for names that are not in `hvdlite`, but in an adapter's package.
- `inner_class`: stand-ins for Horovod's internal classes that programs name.
"""
