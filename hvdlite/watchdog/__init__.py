"""The watchdog owns every wait of a rank, and says which rank is missing.

- `watchdog`: the thread that looks at the waits of this rank.
- `waits`: the record of one wait.
- `letters`: what a rank has sent and received, for reports.
- `links`: sequences of matching calls. If one rank gets out of step in such a sequence, all of its ranks are told.
- `departures`: the ranks that have left the job; those without which it goes on, and what this rank saves before it is ended,
  as the launcher says.
- `launched`: work that goes on on GPUs after the calls that began it have returned.
- `deadlock`: the search for ranks that wait for each other for ever.
- `stalls`: waits that have lasted too long, and what the launcher hears and says of ranks that hang.
  `stall_report`: the text that says where each rank is.
- `threads`: which threads of the program may still do something.
- `failure`: how a rank ends the whole job.

One quiet thread for each rank looks four times a second. A wait for a rank that has left the job fails. A wait over the
limit asks each rank concerned where it is; the lowest waiting rank prints who is missing, with stacks and their last
completed operations. Past a second limit (30 minutes) the wait fails with that report. A wait for a message from one rank
fails when that rank has left, a wait for any rank when all others have. A server says that its wait is of the kind SERVICE:
such a wait may last as long as nobody asks.

A wait fails by an error that the program can catch: a `Link` interrupts it where the ranks of a host meet, and where
headers travel or large data goes by sockets. What is inside of a message that nothing interrupts ends with the job, a
second later. A rank that leaves an exchange in the middle (no memory, Ctrl-C, a signal handler that raises) is out of step:
its link breaks, it tells the others at once, and nobody uses that link again. Our own errors are raised on all ranks alike,
and leave them in step.

Waits that no controller sees together, such as an exchange of gradients on one rank and an operation or a message on
another, or operations of process sets that overlap, are compared by the watchdogs (`deadlock`). What they find can only be
broken off. A thread that uses hvdlite and does not wait keeps its rank from being stuck; a thread that has not used it yet
does not.
"""
