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
- `objects`: what ranks send each other after a meeting: the optimizer's state.
- `messages`: what requests and answers look like.
- `training/`: what a rank does that trains with the servers.
"""
