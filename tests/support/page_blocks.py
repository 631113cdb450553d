"""The pieces of Python on the pages, and what stands around those that are parts of a program.

A page is a program, whose pieces are run one after the other (`PROGRAMS`), or its pieces are examples of their own (`PARTS`).
`python tests/support/page_blocks.py PAGE FRAMEWORK` runs the parts of a page for a framework; tests run it on several ranks.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from textwrap import dedent
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pages import program_of  # noqa: E402

BLOCK = re.compile(r"^ *```(python|diff)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

PROGRAMS = {
    "docs/torch_training.md": "tests/docs/test_pages.py",
    "docs/keras_training.md": "tests/docs/test_pages.py",
    "docs/jax.md": "tests/docs/test_pages.py",
    "docs/tutorial_torch.md": "torch",
    "docs/tutorial_arrays.md": "torch",
    "docs/from_ddp.md": "torch",
    "docs/elastic.md": "torch",
    "docs/tutorial_keras.md": "tf",
    "docs/from_multiworker.md": "tf",
}
"""The pages that are programs, with the test that runs them, or the job of tests/docs/test_pages.py that does."""

_TORCH = """
import functools
import numpy as np, torch
from torch.nn import functional as F
import hvdlite_torch as hvd
hvd.init()
torch.manual_seed(0)
Model = functools.partial(torch.nn.Linear, 4, 3)
model = Model()
hvd.broadcast_parameters(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(6, 4), torch.randint(3, (6,))
my_share_of_the_data = loader = batches = [(x[:3], y[:3]), (x[3:], y[3:])]
"""
_ARRAYS = """
import numpy as np
import hvdlite
import hvdlite as hvd
hvd.init()
random = np.random.default_rng(hvd.rank())
x, y, z = random.normal(size=(3, 5, 4))
weights = {"w": np.zeros(4)}
def gradient(weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    return {"w": 2 * x * (x @ weights["w"] - y)}
"""
_KERAS = """
import os, numpy as np, keras, tensorflow as tf
import hvdlite_tf as hvd
hvd.init()
keras.utils.set_random_seed(0)
def make_model() -> keras.Sequential:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model = make_model()
x = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
y = x.sum(1, keepdims=True)
x_test, y_test = x[:8], y[:8]
"""

PARTS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("README.md", "model = Model()"): ("torch", _TORCH, "assert hvd.assert_in_sync(model) is None"),
    ("README.md", "callbacks.Distributed()"): ("tf", _KERAS, "assert model.optimizer.iterations == 2 * 512 / 64"),
    ("README.md", "total = handle.wait()"): (
        "torch",
        _ARRAYS,
        "assert rows.shape == (5 * hvd.size(), 4)[: rows.ndim] and total.shape == y.shape",
    ),
    ("README.md", "combine = hvd.DistributedGradient()"): (
        "torch",
        _ARRAYS + "batches = [(x[0], y.sum())]",
        "assert all(np.array_equal(gradients['w'], each['w']) for each in hvd.allgather_object(gradients))",
    ),
    ("docs/arrays.md", "combine = hvd.DistributedGradient()"): (
        "torch",
        _ARRAYS + "batches = my_share_of_the_batches = [(x[0], y.sum())]\ninitial_weights = lambda: weights",
        "assert all(np.array_equal(weights['w'], each['w']) for each in hvd.allgather_object(weights))",
    ),
    ("docs/torch.md", "alltoall(z"): (
        "torch",
        _TORCH + "z = torch.arange(8)",
        "assert counts.tolist() == [[3] * 3, [0] * 3, [5] * 3][hvd.rank()]\n"
        "assert torch.equal(total, hvd.allreduce(y, op=hvd.Sum))",
    ),
    ("docs/torch.md", "max_grad_norm=1.0"): ("torch", _TORCH, "hvd.assert_in_sync(model)"),
    ("docs/torch.md", "class SignWithMemory"): (
        "torch",
        _TORCH,
        "F.cross_entropy(model(x), y).backward()\noptimizer.step()\nhvd.assert_in_sync(model)",
    ),
    ("docs/large_batch.md", "hvd.scale_lr"): (
        "torch",
        _TORCH + "total_steps = 1000",
        "assert optimizer.param_groups[0]['initial_lr'] == 0.1 * hvd.size()",
    ),
    ("docs/large_batch.md", "# the mean"): ("torch", _TORCH, "assert n == 6 and loss > 0"),
    ("docs/running.md", "last = hvdlite.join()"): (
        "torch",
        _ARRAYS
        + "batches_of_this_rank = [(np.ones(4), 1.0)] * (2 + hvd.rank())\n"
        + "work = lambda x, y: (x * y, np.array([2.0]))\nseen = []\nupdate = seen.append\nweights = np.full(3, hvd.rank())",
        "assert len(seen) == 2 + hvd.rank() and last == 2 and (weights == 2).all() and (seen[-1] == 0.5).all()",
    ),
    ("docs/timeline.md", "start_timeline"): (
        "torch",
        _ARRAYS + "import os, tempfile\nfolder = tempfile.mkdtemp()\nos.chdir(hvd.broadcast_object(folder))",
        "assert os.path.exists('trace.json')",
    ),
    ("docs/asynchronous.md", "then all have the same parameters"): ("torch", _TORCH, "hvd.assert_in_sync(model)"),
    ("docs/asynchronous.md", "sparse_categorical"): (
        "tf",
        _KERAS.replace("Dense(1)", "Dense(3)") + "y = x.argmax(1) % 3",
        "",
    ),
    ("docs/asynchronous.md", "DCASGD"): ("torch", _TORCH, "optimizer.finish()"),
    ("docs/asynchronous.md", "overlap_pull=True"): (
        "torch",
        _TORCH,
        "F.cross_entropy(model(x), y).backward()\noptimizer.step()\noptimizer.finish()\nhvd.assert_in_sync(model)",
    ),
    ("docs/asynchronous.md", "serve_parameters"): (
        "torch",
        _TORCH + "train = lambda optimizer: None",
        "hvd.assert_in_sync(model)",
    ),
    ("docs/asynchronous.md", "on_worker_loss"): (
        "sketch: needs ranks that only serve; tests/torch/test_torch_async_servers.py trains with them",
        "",
        "",
    ),
    ("docs/serving.md", "predict_padded"): (
        "torch",
        "import numpy as np\npredict_padded = to_one_length = lambda x: x",
        "assert predict(np.ones((2, 28, 28), 'float32')).tolist() == [1.0, 1.0] and texts is not None",
    ),
    ("docs/serving.md", "predict_pairs"): (
        "torch",
        "from hvdlite import servable\npredict_pairs = lambda batch: batch['text'].sum(1)",
        "assert match.spec.inputs[0][0] == 'image'",
    ),
    ("docs/serving.md", "InferenceServerClient"): (
        "sketch: needs a server; tests/serving/test_serving_protocols.py asks one so",
        "",
        "",
    ),
    ("docs/serving.md", "checkpoint.pt"): (
        "torch",
        "import os, tempfile, torch\nos.chdir(tempfile.mkdtemp())\nNet = torch.nn.Flatten\n"
        "torch.save(Net().state_dict(), 'checkpoint.pt')",
        "assert model is not None",
    ),
    ("docs/serving.md", 'hvd.servable("model.keras")'): (
        "tf",
        _KERAS + "import tempfile\nos.chdir(tempfile.mkdtemp())\nmodel.save('model.keras')",
        "assert model is not None",
    ),
    ("docs/strategy.md", "strategy = hvd.Strategy()"): ("tf", _KERAS, ""),
    ("docs/strategy.md", "list_files"): (
        "tf",
        _KERAS
        + "import tempfile\nos.chdir(hvd.broadcast_object(tempfile.mkdtemp(), 0))\nos.makedirs('train', exist_ok=True)\n"
        "with tf.io.TFRecordWriter(f'train/{hvd.rank()}.tfrecord') as file:\n    [file.write(b'1') for _ in range(640)]\n"
        "hvd.barrier()\n"
        "decode = lambda row: (tf.ones(4), tf.ones(1))\n"
        "model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss='mse')\nfit = model.fit\n"
        "model.fit = lambda data, steps_per_epoch: fit(data, steps_per_epoch=5, verbose=0)",
        "",
    ),
    ("docs/strategy.md", "distribute_optimizer"): (
        "tf",
        _KERAS
        + "strategy = hvd.Strategy()\n"
        + "dataset_of_global_batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(256)",
        "",
    ),
    ("docs/checkpoints.md", "hvd.checkpoint.load("): (
        "torch",
        _TORCH
        + "import os, tempfile\nos.chdir(hvd.broadcast_object(tempfile.mkdtemp()))\nepochs = 2\n"
        + "optimizer = hvd.DistributedOptimizer(optimizer)",
        "assert hvd.checkpoint.load('checkpoints', model=model, optimizer=optimizer)['epoch'] == 2",
    ),
    ("docs/checkpoints.md", "wait=False"): (
        "torch",
        _TORCH
        + "import os, tempfile\nos.chdir(hvd.broadcast_object(tempfile.mkdtemp()))\nepoch = 2\n"
        + "optimizer = hvd.DistributedOptimizer(optimizer)",
        "assert hvd.checkpoint.load('checkpoints', model=model, optimizer=optimizer)['epoch'] == 2",
    ),
    ("docs/loggers.md", "SummaryWriter"): (
        "torch",
        "import os, sys, tempfile\nfolder = tempfile.mkdtemp()\nos.chdir(folder)\nsys.argv = ['train.py']",
        "assert mean < 0.2 and os.path.isdir('runs') == (hvd.rank() == 0)",
    ),
    ("docs/loggers.md", "mlflow"): (
        "mlflow",
        _TORCH
        + "import os, tempfile\nfolder = tempfile.mkdtemp()\nos.environ['MLFLOW_TRACKING_URI'] = f'sqlite:///{folder}/runs.db'\n"
        + "os.chdir(folder)\noptimizer = hvd.DistributedOptimizer(optimizer)",
        "runs = mlflow.search_runs(output_format='list')\n"
        "assert [run.data.params['ranks'] for run in runs] == [str(hvd.size())] * (hvd.rank() == 0)\n"
        "assert all(run.data.metrics['loss'] == mean and run.info.status == 'FINISHED' for run in runs)",
    ),
    ("docs/loggers.md", "hvdlite.run"): (
        "sketch: a rank cannot start ranks; tests/docs/test_notebook.py makes this call in examples/notebook.ipynb",
        "",
        "",
    ),
    ("docs/integrations.md", "accelerate.Accelerator()"): (
        "accelerate",
        "import torch\ntorch.set_default_dtype(torch.float64)",
        "import os\nimport hvdlite_torch as hvd\n"
        "torch.manual_seed(0)\nx, y = torch.randn(48, 5), torch.randn(48, 2)\n"
        "alone = torch.nn.Linear(5, 2)\nadam = torch.optim.Adam(alone.parameters(), lr=0.1)\n"
        "for inputs, wanted in zip(x.split(4 * hvd.size()), y.split(4 * hvd.size())):\n"
        "    adam.zero_grad()\n    F.mse_loss(alone(inputs), wanted).backward()\n    adam.step()\n"
        "away = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters()))\n"
        "assert away < 1e-12, away\n"
        "numbers = (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index)\n"
        "assert numbers == (hvd.size(), hvd.rank(), hvd.local_rank()), numbers\n"
        "assert accelerator.gather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))\n"
        "assert torch.distributed.get_backend() == 'hvdlite' and os.environ['WORLD_SIZE'] == str(hvd.size())\n"
        "assert type(model).__name__ == 'DistributedDataParallel'\n"
        "hvdlite_torch.accelerate.prepare()  # once more does nothing",
    ),
    ("docs/integrations.md", "optuna"): (
        "optuna",
        "",
        "assert lr == hvd.broadcast_object(lr, 0)\n"
        "assert study is None or len(study.trials) == 12 and study.best_value < 0.01, study.best_value",
    ),
    ("docs/integrations.md", "wandb"): (
        "wandb",
        "import os, tempfile\nfolder = tempfile.mkdtemp()\nos.environ['WANDB_DIR'] = folder",
        "import pathlib\nrecords = list(pathlib.Path(folder).rglob('*.wandb'))\n"
        "assert mean < 0.2 and len(records) == (hvd.rank() == 0), records",
    ),
    ("docs/gpu.md", "torch.cuda.set_device"): ("sketch: needs a GPU; tests/gpu makes the same calls", "", ""),
    ("docs/gpu.md", "the model is on the GPU already"): ("sketch: needs a GPU; tests/gpu makes the same calls", "", ""),
    ("docs/keras.md", "EarlyStopping"): ("tf", _KERAS + "import tempfile\nos.chdir(tempfile.mkdtemp())", ""),
    ("docs/keras.md", "shard=True"): ("tf", _KERAS, "model.fit(x, y, verbose=0)"),
    ("docs/keras.md", "whole_state"): (
        "tf",
        _KERAS + "import tempfile\nos.chdir(tempfile.mkdtemp())\n"
        "model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard=True), 'mse')\nmodel.fit(x, y, verbose=0)",
        "assert os.path.exists('model.keras') == (hvd.rank() == 0)",
    ),
}
"""For the pieces that are parts of a program, found by words in them: what they are for, what stands before them, and what must
hold after them. A sketch is only compiled; it says why.
"""


def _code(kind: str, text: str) -> str:
    if kind == "diff":
        text = "".join("\n" if line.startswith("-") else line[1:] or "\n" for line in text.splitlines(keepends=True))
    return dedent(text)


def blocks(page: str) -> list[tuple[int, str]]:
    """The pieces of Python of a page, each with the number of its first line. Of a diff it is the program that comes out."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, each.start(2)) + 1, _code(*each.groups())) for each in BLOCK.finditer(text)]


def part_of(page: str, block: str) -> tuple[str, str, str]:
    """The entry of `PARTS` for a piece of a page."""
    found = [part for (where, words), part in PARTS.items() if where == page and words in block]
    assert len(found) == 1, (
        f"tests/support/page_blocks.py needs one entry for this piece of {page}, and has {len(found)}:\n{block}"
    )
    return found[0]


def run(page: str, framework: str) -> int:
    """Run the parts of a page that are for a framework, or a page that is a program. Return how many pieces were run."""
    where = str(ROOT / page)  # TensorFlow looks there for the source of functions that it translates
    if page in PROGRAMS:
        os.chdir(tempfile.mkdtemp())
        pieces = blocks(page)
        exec(compile(program_of(ROOT / page), where, "exec"), {"__name__": "__main__"})
        return len(pieces)
    count = 0
    for line, block in blocks(page):
        kind, before, after = part_of(page, block)
        if kind != framework:
            continue
        sys.modules["page"] = module = ModuleType("page")  # TensorFlow looks for the module of functions
        names = vars(module)
        exec(compile(before, f"before line {line} of {page}", "exec"), names)
        exec(compile("\n" * (line - 1) + block, where, "exec"), names)
        exec(compile(after, f"after line {line} of {page}", "exec"), names)
        count += 1
    return count


if __name__ == "__main__":
    here = os.getcwd()
    with warnings.catch_warnings(record=True):  # parts of programs read the same data on all ranks, and hvdlite warns
        warnings.simplefilter("always")
        done = run(sys.argv[1], sys.argv[2])
    os.chdir(here)
    print(f"{done} pieces")
