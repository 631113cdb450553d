"""The TCP connection between a rank and its launcher, shared by both.

- `link`: the rank's end of the connection.
- `session`: the messages, and how each end makes sure who the other end is.
- `handlers`: ends the program's signal handlers when the program is over.

`hvdlite.worker.worker` loads these files without NumPy and without `hvdlite` itself, so they import the standard library and
each other only, by relative imports.
"""
