"""What a rank and its launcher share: the line between them, and how a program is left alone once it is over.

- `link`: the rank's end of the line.
- `session`: what travels on it, and how each end knows the other.
- `handlers`: the program's signal handlers, once it is over.

`hvdlite.worker.worker` loads these files without NumPy and without `hvdlite` itself, so they import the standard library and
each other only, by relative imports.
"""
