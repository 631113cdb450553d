"""How a user starts a job: by hvdliterun or by `hvdlite.run`. Both make a `JobSpec`, and `job/` runs it.

__main__.py            runs cli.py for ``python -m hvdlite.launch``
cli.py                 makes a job of the options of hvdliterun, and runs it
 |- parser.py          has these options
 |- arguments.py       reads the arguments of all commands, says what is wrong with them, and makes a shell complete them
 |- elastic/           runs jobs that go on when ranks fail and hosts come or go
 |- dashboard/         shows a running job: a page, and ``hvdlite top``
 |- horovod_flags.py   lists the flags that only horovodrun has
 |- horovod.py         makes ``import horovod`` mean hvdlite in a job
 |- where.py           has the options that name ranks and hosts, which other commands have too
 |- check_build.py     lists what is installed, for --check-build; and the settings that hold, for ``hvdlite env``
 '- allocation.py      chooses the hosts if the user names none: those of Slurm, PBS or LSF, or of a default hostfile
job/                   starts the ranks of one job, watches them, and ends them; worker/: what it starts on each host
run_function.py        is `hvdlite.run`; it takes its checks and its choice of hosts from cli.py
"""
