"""The watchdog owns every wait of a rank, and says which rank is missing.

- `watchdog`: the thread that looks at the waits of this rank.
- `waits`: the record of one wait.
- `letters`: what a rank has sent and received, for reports.
- `links`: sequences of matching calls. If one rank gets out of step in such a sequence, all of its ranks are told.
- `informer`: what the launcher hears and says of ranks that hang.
- `departures`: the ranks that have left the job; those without which it goes on, and what this rank saves before it is ended,
  as the launcher says.
- `launched`: work that goes on on GPUs after the calls that began it have returned.
- `deadlock`: the search for ranks that wait for each other for ever.
- `stalls`: waits that have lasted too long. `stall_report`: the text that says where each rank is.
- `threads`: which threads of the program may still do something.
- `failure`: how a rank ends the whole job.
"""
