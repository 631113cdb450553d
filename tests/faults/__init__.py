"""Seeded faults into real jobs: each must end as it should, in these words, and leave nothing behind.

kinds.py     the faults, and what must come of each      program.py   the training that they happen to
places.py    one machine, or namespaces as hosts         harness.py   one fault: start, strike, judge

``scripts/faults --seed 1 --count 500`` runs many, with a table at the end; tests/test_faults.py runs a few.
"""
