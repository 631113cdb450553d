"""Programs written for Horovod, as they are: ``import horovod`` means hvdlite in this process and in its children.

    python -m hvdlite.compat train.py      hvdliterun --horovod -np 4 train.py      python -m hvdlite.compat --report train.py
              │                                     │                                          │
           cli.py ─ installs ─▶ finder.py ◀─ startup/sitecustomize.py                   report.py ◀─ usage.py, shell.py
                                    │            (every Python below, by PYTHONPATH)           │     what a file uses
              import horovod.torch  ▼                                                          ▼
                                modules.py  makes the module ◀─ table.py ─▶ status.py  supported, changed or missing
                                    │
                                    ▼
                     hvdlite_torch, hvdlite_tf, and here: common/, runner.py

Nothing on disk is changed, and a Horovod that is installed is left alone: ours is found first.
"""
