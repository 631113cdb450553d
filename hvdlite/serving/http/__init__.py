"""What clients see of a server.

- `connections`: how many connections there may be, and how long a header may take and be.
- `app`: the paths; `predict_endpoint`: what those that compute have in common, and our own.
- `page`: OpenAPI, and a page to try it; `docs_page`: OpenAPI as a page.
- `open_inference`: the Open Inference Protocol, with `tensors`; `tf_serving`: the REST interface of TensorFlow Serving;
  `model_pages`: what both say of the models.
- `negotiation`: what headers say of formats, gzip and keys.
- `bodies`: the formats of inputs and outputs: JSON, .npy and msgpack.
"""
