"""What clients see of a server.

- `connections`: how many connections there may be, and how long a header may take and be.
- `app`: the paths; `predict_endpoint`: those that compute; `page`: OpenAPI, and a page to try it.
- `bodies`: the formats of inputs and outputs: JSON, .npy and msgpack.
"""
