"""A trained model behind HTTP: requests become batches, and processes compute them. Nothing of training is in here.

```
 HTTP ─▶ http/ ─▶ models: service ─▶ replicas/ ══ sockets ══ processes, which call a Servable
                          batcher, waiting
```

- `command`: the options of ``hvdlite serve``; `serve`: ``hvd.serve``; `options`: the settings, checked.
- `server`: a server from its start to its end: port, signals, log.
- `models`: the models by name, and how one is loaded anew while it serves.
- `service`: requests become outputs, in an event loop; `metrics`: what is counted.
- `batcher`: which requests go together, when, and to which replica; what happens to a batch that fails.
- `isolation`: which requests of a failed batch are to blame; `suspects`: inputs that did harm lately.
- `waiting`: how long the oldest request waits for others, behind a protocol.
- `chooser/`: chooses that time while it serves.
- `bench/`: ``hvdlite serve-bench``, which measures a server.
- `child`: starts a process of the server; `wire`: what it and the server send each other.
- `servable`: what a function says of its inputs.

It needs no MPI. One process has HTTP (uvicorn on an event loop) and no framework; each replica is a process of its own,
which imports the program's function. The `Batcher` is a state machine that is told what happens and when, and says which
batch goes to which replica, and when to ask again. It holds no socket, no thread and no clock, so the tests try every order
of events. `Service` drives it from the event loop. How long a batch waits for more requests is asked of a `WaitChooser`:
`AutoWait` notes what it sees, and gives it once a second to a `Model` in another process, for Python's lock is the
requests'.
"""
