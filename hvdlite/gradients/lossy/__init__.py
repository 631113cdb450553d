"""Gradients in fewer bytes, for slow links: aggregators that send a part of what they have, and remember the rest.

- `powersgd`: `PowerSGD` sends two thin matrices in place of a large one.
- `topk`: `TopK` sends the largest elements.
- `names`: `Compression`, their public names.
- `memory`: what both remember: `Errors`, what was not sent yet; `ExactSteps`, the steps at the beginning that send all.
"""
