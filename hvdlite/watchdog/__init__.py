"""Every wait has an owner who says who is missing.

- `watchdog`: the thread that looks at what this rank waits for.
- `deadlock`: ranks that wait for each other for ever, two or a circle of any length.
- `stall_report`: where each rank is, in words.
- `threads`: which threads of the program may still do something.
- `failure`: how a rank ends the whole job.
"""
