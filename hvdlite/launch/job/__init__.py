"""One job of hvdliterun: this room starts the ranks with an MPI launcher, watches them, and ends them.

job.py              runs one job from start to end
 |- hosts.py        reads lists of hosts, and finds the address that the hosts reach
 |- ssh.py          checks by ssh that other hosts are fit for their ranks
 |- mpi.py          finds the MPI launcher, and makes its command line
 |- mpi_process.py  runs that MPI launcher
 |- reports.py      acts on each message of the ranks     <--TCP-->  `hvdlite.launch.worker` on each rank
 |- ranks.py        keeps the state of each rank
 |- pulses.py       has what each rank says of itself once a second, if somebody looks at the job
 |- departure.py    says what keeps ranks that do not end
 |- survival/       lets the job go on when it loses ranks, or gets others
 |- failures.py     finds the rank that failed first, and describes the failure
 |- signals.py      lets a job handle the signals by which a user ends it
 '- output.py       prints the output of the ranks in whole lines, tagged by rank
"""
