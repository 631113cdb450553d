"""The launcher: starts a job's ranks with a real MPI launcher, watches them, and ends them.

cli.py            options of hvdliterun          run_function.py   hvdlite.run
        \\                                       /
         job.py   start, watch, end, sweep
          |- hosts.py     where the ranks go
          |- mpi.py       which MPI, and its command line
          |- server.py    what the ranks say      <--TCP-->  worker.py   runs on each rank
          |- failures.py  who failed first, in words
          '- output.py    whole lines, tagged by rank
"""
