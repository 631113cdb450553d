"""A job that goes on when ranks fail and hosts come or go: one `Job` after another, each a generation of the same training.

supervisor.py   runs the generations: starts each, watches the hosts meanwhile, and asks the policy what comes next
 |- policy.py      decides which hosts the next generation gets, how long to wait for hosts, and when to give up
 |- discovery.py   asks the user's script for the hosts, and tries whether new ones answer, before the ranks are interrupted
 |- state_folder.py keeps commits in a folder, from which the same command goes on when hvdliterun was lost
 |- janitor.py     removes the committed state from all hosts at the end, whatever has ended hvdliterun
 '- options.py     reads the options, makes a `Supervisor` of them, and runs it

Each generation has a secret and a port of its own. The policy is a state machine without processes and clock, so the tests
try every order of events::

    Supervisor ── Policy: Start, Wait, End  rank: elastic.run ── State.commit ── HostKeeper ── Store: /dev/shm of each host
      │ Job 1, Job 2, …  ◀── committed, leaving ─────────────────────────────────── │
      │ Discovery, Newcomers  ── hosts have changed ─────────────────────────────▶ Line
      └ Janitor: removes the files, even if hvdliterun is killed
"""
