"""What a rank does that trains with a parameter server, as far as it is the same in all frameworks.

- `training`: what one rank does: pushes, meetings, the state of the servers, and the end.
- `replica`: what a framework adds: the parameters of a rank as bytes, its gradients, and the parts of the servers.
- `options`: the arguments of `AsyncDistributedOptimizer`, checked.
- `pull`: the values that were pulled; receives them while the program goes on.
- `gradients`: adds up a worker's gradients for the next push.
- `failures`: what a rank does if ranks fail, and the arguments for that, checked.
- `methods`: the methods that an optimizer gets in every framework.
- `unfinished`: `serve_parameters`; finishes at the end of the program what the program has not.
"""
