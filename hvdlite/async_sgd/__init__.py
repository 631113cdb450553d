"""A parameter server: ranks train at their own pace, and servers hold the parameters. No framework is in here.

A *server* holds a part of the parameters: some whole tensors. A *worker* trains. It *pushes* its gradients to every server, and
each server answers with the present values of its part. When a server applies a push, and when it answers, is the mode:

- "sync": the server waits for the pushes of all workers, and makes one step with their weighted mean.
- "ssp" (stale-synchronous): the server makes a step with each push at once, but lets no worker get more than some steps ahead
  of the slowest (Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013).
- "async": the server makes a step with each push at once, and answers at once (J. Dean et al., "Large scale distributed deep
  networks", NIPS 2012).

- `deal`: which server holds which tensors; `rows`: sparse gradients.
- `part`: what a framework adds: the step of a part, on bytes.
- `compensation`: what a server does about gradients that are old.
- `server`: what one server does with each request, without messages, and how many steps each worker has made;
  `service`: the thread that receives and answers.
- `worker`: the pushes of one rank, and its meetings with all other ranks; `early`: what it sends before a push.
- `messages`: what requests and answers look like.
- `training/`: what a rank does that trains with the servers.

`ParameterServer` gets one request at a time and returns the answers that are due. It holds no channel and no thread, so the
tests try every order of requests. `ParameterService` is the thread that receives and sends; its wait for the next request is of
the kind SERVICE, which is never reported. A worker has at most one request at a server: so a server needs one buffer for each
worker, and when all ranks have come to a meeting (`finish`, `state_dict`), all pushes are applied. Chunks of gradients may
come before their push, into this buffer (`early`). Nothing is applied before the push, whose head says what is there, and
which chunks follow again. Values may come after the step has returned, in chunks: a thread receives them (`training.pull`),
and each layer of the model waits for its own::

    rank 0: step()                     rank 0's service: part 0         rank 1's service: part 1
      │ push: gradients of part 0 ──────────▶ one step of its optimizer         │
      │       gradients of part 1 ───────────────────────────────────────▶ one step of its optimizer
      ▼ values of part 0 ◀──────────────── at once, or when the clocks allow it │
        values of part 1 ◀───────────────────────────────────────────────────────

A training can go on without a worker that fails (`on_worker_loss`). The launcher knows how each rank ended; ranks that want
to hear of it keep a connection to it. The guards of all ranks then stay until the end, and nobody closes MPI, which takes
all ranks. A service asks itself to go on without the worker, by a message, so that its server still gets one request at a
time.
"""
