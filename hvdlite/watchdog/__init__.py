"""Every wait has an owner who says who is missing.

- `watchdog`: the watchdog of one rank, with the thread that looks at its waits.
- `waits`: the description of one wait.
- `links`: a link connects the ranks that do the same in the same order; all of them learn if one gets out of step.
- `launched`: work on GPUs that goes on after the call that launched it has returned.
- `deadlock`: finds ranks that wait for each other for ever, two or a circle of any length.
- `stalls`: reports waits that have lasted too long; `stall_report`: the texts of these reports.
- `threads`: the threads of the program that may still do something.
- `failure`: ends the whole job.
"""
