"""Every wait has an owner who says who is missing.

- `watchdog`: the thread that looks at what this rank waits for.
- `waits`: what it knows of one wait.
- `links`: where ranks do the same in the same order, and hear of it if one gets out of step.
- `launched`: what runs on GPUs after the calls that began it have returned.
- `deadlock`: ranks that wait for each other for ever, two or a circle of any length.
- `stalls`: waits that have lasted too long; `stall_report`: where each rank is, in words.
- `threads`: which threads of the program may still do something.
- `failure`: how a rank ends the whole job.
"""
