"""The link between a rank and its launcher: a TCP connection that carries authenticated control messages.

    link.py      the rank's end: connects, sends requests, reports failures
     |- server.py    the launcher's end: accepts connections, and receives what is asked and reported
     |- line.py      a connection that a rank keeps, to hear what becomes of other ranks and of the hosts
     '- session.py   authenticates both ends, and makes bytes of messages and messages of bytes, for both ends
    generation.py   what the ranks of one generation of an elastic job are told at their start
    commit_file.py  the form of a file that holds what such a job has committed
    whole_file.py   writes a file that is either whole or as it was before
    handlers.py     switches the signal handlers of a program off once the program is over

`hvdlite.launch.worker.worker` loads these files without NumPy and without `hvdlite` itself. So these files import only the
standard library and each other, by relative imports.
"""
