"""How fast hvdlite is, next to its peers in the same run: ``python -m benchmarks``.

::

    __main__   the options; starts each part, prints, writes JSON and pictures
    plan       what is measured, with whom, and how
    job        runs a function on ranks, in a job of their own, and brings back what rank 0 returns
    allreduce  ┐                        ┌ collectives  hvdlite, MPI, gloo, Horovod, memcpy: each sums one tensor
    steps      ├ run on the ranks, with ┤ variants     hvdlite, DDP, flat MPI, Horovod: each trains one model
    memory     ┘                        └ models       what is trained, the optimizers and the data
    keras_steps  the same for Keras' fit, by itself
    backends   starts gloo and Horovod beside hvdlite
    checks     results are right, or there are no figures
    figures    from samples to medians and minima; `machine` is what they belong to
    report     figures as text; `plots` as pictures

``python -m benchmarks.gpu`` is another program: training steps on a GPU, next to DDP; `gpu_pair` is its part for two ranks.
"""
