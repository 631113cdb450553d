"""The peers of `benchmarks.serving`, as programs: ``python -m benchmarks.serving_peers --port PORT``.

The environment variable SERVING_PEER says which: a peer, a model, the largest batch, and the wait in ms. All read and write the
same JSON as hvdlite.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from benchmarks.serving_models import load

VARIABLE = "SERVING_PEER"


def settings() -> tuple[str, str, int, int]:
    """Return the peer, the model, the largest batch, and the wait."""
    peer, model, max_batch, wait = os.environ[VARIABLE].split()
    return peer, model, int(max_batch), int(wait)


PEER, MODEL, MAX_BATCH, WAIT = settings()

# What computes is imported by processes of the peer's own, so it is at the top of this module.
if PEER == "mosec":
    import mosec

    class MosecWorker(mosec.Worker):  # type: ignore[misc]  # mypy does not see mosec
        """The model in mosec."""

        def __init__(self) -> None:
            self.compute = load(MODEL)

        def forward(self, data: list[Any]) -> list[Any]:
            """Compute a batch of requests."""
            outputs = self.compute(np.array([each["input"] for each in data], np.float32))
            return [{"output": output} for output in outputs.tolist()]

    def run(port: int) -> None:
        """Serve. mosec reads the port from the command line itself."""
        server = mosec.Server()
        server.append_worker(MosecWorker, max_batch_size=MAX_BATCH, max_wait_time=WAIT)
        server.run()

else:
    import litserve

    class LitServeApi(litserve.LitAPI):  # type: ignore[misc]  # mypy does not see LitServe
        """The model in LitServe."""

        def setup(self, device: str) -> None:
            """Load the model."""
            self.compute = load(MODEL)

        def decode_request(self, request):  # type: ignore[no-untyped-def]  # a type would say where FastAPI finds it
            """Read a request."""
            return np.asarray(request["input"], np.float32)

        def batch(self, inputs: list[Any]) -> Any:
            """Make a batch."""
            return np.stack(inputs)

        def predict(self, batch: Any) -> Any:
            """Compute a batch."""
            return self.compute(batch)

        def unbatch(self, outputs: Any) -> list[Any]:
            """Divide the outputs of a batch."""
            return list(outputs)

        def encode_response(self, output: Any) -> Any:
            """Write an answer."""
            return {"output": output.tolist()}

    def run(port: int) -> None:
        """Serve."""
        api = LitServeApi(max_batch_size=MAX_BATCH, batch_timeout=WAIT / 1000, api_path="/inference")
        server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
        server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")


if __name__ == "__main__":
    run(int(sys.argv[-1]))
