"""Seeded faults in real jobs. Each job must end as expected, with the expected message, and leave nothing behind.

kinds.py     the kinds of faults, and the expected end   program.py   the training in which the faults happen
places.py    one machine, or namespaces as hosts         harness.py   one fault: starts a job, causes the fault, judges the end

``scripts/faults --seed 1 --count 500`` runs many faults, with a table at the end. tests/launch/test_faults.py runs a few.
"""
