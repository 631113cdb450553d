"""How the gradients of one rank become the combined gradients of all ranks.

Each class named `…Sync` is a `GradientSync`, which `hvdlite_torch.step.driver` drives. Its `results` are what the
optimizer steps with.

- `host`: combines gradients in host memory; `host_gradients`: the gradients of one layout, in the memory of a reducer.
- `slot`: where the gradient of one parameter lies; `large_gradients`, `small_gradients`: slots one by one, and all at once.
- `encoded`: compressed gradients; `sparse`: sparse gradients.
- `whole`: the results if each rank steps all parameters, and the base of syncs whose ranks step with their own gradients;
  `host_sharded`: the results if each rank steps its shard.
- `adasum`: combines the changes that the steps make, instead of gradients; `local_steps`: parameters, after several steps.
- `device`, `device_sharded`: combine gradients on a GPU, by `hvdlite.gradients.device`; `device_gradients`: ``p.grad`` as views
  of buckets; `backward`: what backward passes launch, whether gradients have changed since, and CUDA graphs.
- `measured`: measures the steps of a program for ``hvdlite advise``.
- `catch_up`: the part of an optimizer in a group of ranks: `join`, and `init` after `shutdown`.

What a program sees in ``p.grad`` is what is exchanged, whatever it does to it between ``backward`` and ``step``. So the
step looks at each gradient again. A large gradient is a tensor in the shared memory itself; or autograd's own memory, if
nobody else sees it, by torch's counts of references (`hvdlite_torch.tensors.ownership`); or copied by the step, and the
result is copied back into it. The way of a large gradient in host memory through the code; each arrow is a call, and 8
types handle it::

    step/driver.py    host.py             host_gradients.py       large_gradients.py       slot.py       hvdlite/gradients/
    StepDriver        HostSync            HostGradients           LargeGradients           Slot          Reducer, Bucket

    backward ───────▶ ready ────────────▶ take ──────────────────────────────────────────▶ take
                                                                                            copied to the bucket's memory
    before the step ▶ combine ──────────▶ collect ──────────────▶ collect ───────────────▶ find, load
                         │                                                                  what is not yet there
                         └─────────────────────────────────────────────────────────────────────────────▶ exchange
                         │                                                                          meet; each Segment:
                         │                                                                          WeightedSum ▶ Reduction
                         │                                                                          meet
                         └──────────────────────────────────────▶ deliver        p.grad is that memory; if not: Slot.give
    the optimizer's own step                                                               copies the result to it
"""
