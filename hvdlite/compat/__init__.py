"""Programs written for Horovod run unchanged: ``import horovod`` means hvdlite in this process and in its children.

    python -m hvdlite.compat train.py      hvdliterun --horovod -np 4 train.py      python -m hvdlite.compat --report train.py
              │                                     │                                          │
           cli.py ─ installs ─▶ finder.py ◀─ startup/sitecustomize.py                   report.py ◀─ usage.py, shell.py
                                    │            (every Python below, by PYTHONPATH)           │     what a file uses
              import horovod.torch  ▼                                                          ▼
                                modules.py  makes the module ◀─ table.py ─▶ status.py  supported, changed or missing
                                    │                                          ▲
                                    ▼                                settings_table.py  variables, and flags of horovodrun
                     hvdlite_torch, hvdlite_tf, and here: common/, environment.py, runner.py

``python -m hvdlite.compat`` runs __main__.py, which calls cli.py. Nothing on disk is changed, and an installed Horovod is
left alone: the finder comes before the installed package.
"""
