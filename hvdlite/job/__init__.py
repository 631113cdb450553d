"""One job: starts its ranks with a real MPI launcher, watches them, and ends them.

job.py   what happens, what follows
 |- hosts.py        where the ranks go, and how to get there
 |- mpi.py          which MPI, and its command line
 |- mpi_process.py  that MPI launcher, running
 |- ranks.py        what is known of each rank
 |- reports.py      what follows from what a rank says
 |- server.py       what the ranks say    <--TCP-->  `hvdlite.worker` on each rank
 |- failures.py     who failed first, in words
 '- output.py       whole lines, tagged by rank
"""
