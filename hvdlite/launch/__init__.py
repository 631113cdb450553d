"""How a user starts a job: hvdliterun and `hvdlite.run`. What they start and watch is a `hvdlite.job`.

cli.py             options of hvdliterun
run_function.py    hvdlite.run
allocation.py      which hosts, where nobody names any: those of Slurm, PBS, LSF, or a default hostfile
horovod.py         what lets ``import horovod`` mean hvdlite in a job
horovod_flags.py   horovodrun's flags
check_build.py     what is installed
__main__.py        ``python -m hvdlite.launch``
"""
