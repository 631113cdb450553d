"""Measures how fast hvdlite and its peers are, in the same run: ``python -m benchmarks``.

::

    __main__   the options; starts each part, prints figures, writes JSON and pictures
    plan       what is measured, with which peers, and how
    job        runs a function on ranks, in a job of their own, and returns the result of rank 0
    turns      lets several jobs take turns
    steps      measures training steps: `trainer` is the part of it that runs in each job, `ways` compares the trained weights
    allreduce  ┐                        ┌ collectives  hvdlite, MPI, gloo, Horovod, memcpy: each sums one tensor
    trainer    ├ run on the ranks, with ┤ variants     hvdlite, DDP, ZeRO, flat MPI, Horovod: each trains one model
    memory     ┘                        └ models       what is trained, the optimizers and the data
    keras_steps  measures the steps of Keras' fit, with its own variants
    backends   starts gloo and Horovod beside hvdlite
    checks     checks the results: a wrong result gives no figures
    figures    computes medians and minima of samples; `machine` describes the machine that was measured
    against    compares hvdlite in this tree with hvdlite in another tree, as `steps` does
    report     shows figures as text; `plots` draws them

There are other programs. ``python -m benchmarks.early_push`` measures what it saves to push gradients to a parameter server
while the backward pass goes on. ``python -m benchmarks.slow_link`` trains over a slow link between two hosts, and counts
bytes. ``python -m benchmarks.scaling`` counts the messages of the negotiation by the number of ranks and tensors. ``python -m
benchmarks.many_ranks`` runs the negotiation and the algorithms of up to 1024 ranks in virtual time (`virtual_ranks`), with
what messages cost here (`message_costs`), and compares with formulas. ``python -m benchmarks.gpu`` measures training steps of
hvdlite and DDP on a GPU; `gpu_pair` is its part for two ranks. `hogwild`, which hvdliterun starts, counts what is lost when
ranks share parameters without locks. ``python -m benchmarks.recovery`` measures how long an elastic job takes to go on after
a rank was killed. ``python -m benchmarks.serving_faults`` kills replicas of a server and lets clients misbehave, and accounts
for every request. ``python -m benchmarks.serving`` measures ``hvdlite serve`` beside mosec and LitServe: `serving_models` has
what they serve, and `serving_peers` runs these two. ``python -m benchmarks.serving_timeout`` draws latency and cost by the
time-out of a batch, in virtual time (`virtual_serving`). ``python -m benchmarks.serving_slo`` compares the chosen time-out
with fixed ones on real servers, and lets the load jump. ``python -m benchmarks.doctor`` compares the step that ``hvdlite
doctor`` predicts with the one that it measures.
"""
