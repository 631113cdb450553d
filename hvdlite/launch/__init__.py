"""The launcher: starts a job's ranks with a real MPI launcher, watches them, and ends them.

cli.py            options of hvdliterun          run_function.py   hvdlite.run
        \\                                       /
         job.py   what happens, what follows
          |- hosts.py        where the ranks go; of an allocation (Slurm, PBS, LSF): allocation.py
          |- mpi.py          which MPI, and its command line
          |- mpi_process.py  that MPI launcher, running
          |- ranks.py        what is known of each rank
          |- server.py       what the ranks say    <--TCP-->  worker.py  runs on each rank:
          |- failures.py     who failed first, in words         |- guard.py    watches it
          '- output.py       whole lines, tagged by rank        |- program.py  becomes the user's program
                                                                |- orphans.py  what it left behind
                                                                |- rank_environment.py  MPI's variables, threads
                                                                '- shared_memory.py     MPI's files in /dev/shm

`horovod` lets ``import horovod`` mean hvdlite in a job, `horovod_flags` has horovodrun's flags, `check_build` lists what is
installed, and `__main__` is ``python -m hvdlite.launch``.
"""
