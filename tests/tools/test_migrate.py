"""``hvdlite migrate``: what it changes, what it leaves alone and says so, and that what comes out trains as it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdlite.errors import ArgumentError
from hvdlite.tools.cli import main
from hvdlite.tools.migrate import accelerate, ddp, horovod, strategy
from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Program
from tests.support.jobs import LIMIT, Start
from tests.support.selection import needs

DISTRIBUTED = """\
import os
import torch.distributed as dist
"""
TRANSLATE = {
    "ddp": ddp.translate,
    "horovod": horovod.translate,
    "tf.distribute": strategy.translate,
    "accelerate": accelerate.translate,
}


def migrated(text: str, kind: str = "ddp") -> tuple[str, Edits]:
    """The new text of a program, and its edits. The new text parses."""
    edits = TRANSLATE[kind](Program(text))
    new = edits.result()
    compile(new, "migrated", "exec")
    return new, edits


def by_hand(edits: Edits) -> dict[int, str]:
    return {note.line: note.text for note in edits.notes if note.by_hand}


# ---- torch.distributed ----


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('r = int(os.environ["RANK"])', "hvd.init()\nr = hvd.rank()"),
        ('r = int(os.environ.get("LOCAL_RANK", 0))  # why', "hvd.init()\nr = hvd.local_rank()  # why"),
        ('r = os.getenv("WORLD_SIZE")', "hvd.init()\nr = str(hvd.size())"),
        ("d = f\"cuda:{os.getenv('LOCAL_RANK', 0)}\"", None),
        ('if "RANK" in os.environ: r = 1', "if True: r = 1"),
        ('os.environ["MASTER_ADDR"] = "localhost"\nx = 1', "x = 1"),
        ('if x: os.environ["MASTER_PORT"] = "1"', "if x: pass"),
        ('if x:\n    os.environ.setdefault("MASTER_PORT", "1")', "if x:\n    pass"),
        ('if x: pass\nelif y: r = int(os.environ["RANK"])', "hvd.init()\nif x: pass\nelif y: r = hvd.rank()"),
        ('@f(int(os.environ["RANK"]))\ndef g(): pass', "hvd.init()\n@f(hvd.rank())\ndef g(): pass"),
        (
            'é = "é"; a = int(os.environ["RANK"]); b = int(os.environ["WORLD_SIZE"])',
            'hvd.init()\né = "é"; a = hvd.rank(); b = hvd.size()',
        ),
    ],
)
def test_variables_of_torchrun(old: str, new: str | None) -> None:
    text, edits = migrated(DISTRIBUTED + old + "\n")
    if new is None:  # before Python 3.12 the places in f-strings are unknown
        assert "str(hvd.local_rank())" in text or "str(hvd.local_rank())" in by_hand(edits)[3]
        return
    body = text.removeprefix(DISTRIBUTED)
    assert re.sub(r"import hvdlite_torch.*\n", "", body) == new + "\n"
    assert not by_hand(edits)
    assert ("import hvdlite_torch as hvd\n" in body) == ("hvd." in new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('dist.init_process_group("nccl")', 'dist.init_process_group("hvdlite")'),
        ("dist.init_process_group()", 'dist.init_process_group("hvdlite")'),
        (
            'dist.init_process_group(backend="gloo", init_method=url, timeout=limit, device_id=device)',
            'dist.init_process_group("hvdlite", timeout=limit)',
        ),
        ('dist.init_process_group("gloo", rank=0, world_size=1)', 'dist.init_process_group("hvdlite")'),
        (
            'args.rank = args.node * 8 + gpu\ndist.init_process_group("gloo", rank=args.rank)\nprint(args.rank)',
            'args.rank = args.node * 8 + gpu\nhvd.init()\nargs.rank = hvd.rank()\ndist.init_process_group("hvdlite")\n'
            "print(args.rank)",
        ),
        (
            'n = torch.cuda.device_count()\ndist.init_process_group("gloo", world_size=n)\nsampler(n)',
            'hvd.init()\nn = hvd.size()\ndist.init_process_group("hvdlite")\nsampler(n)',
        ),
    ],
)
def test_the_process_group(old: str, new: str) -> None:
    text, edits = migrated(DISTRIBUTED + old + "\n")
    assert re.sub(r"import hvdlite_torch.*\n", "", text.removeprefix(DISTRIBUTED)) == new + "\n"
    assert "import hvdlite_torch" in text and not by_hand(edits)


SPAWN = '''\
"""Trains."""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def setup(rank, world_size):
    # where the ranks meet
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def train(rank, world_size, lr):
    setup(rank, world_size)
    sampler = Sampler(world_size, rank)


def start(function, world_size):
    mp.spawn(function, args=(world_size, 0.1), nprocs=world_size, join=True)


if __name__ == "__main__":
    start(train, torch.cuda.device_count())
'''


def test_spawn_becomes_a_call_with_the_rank_and_size_of_the_job() -> None:
    text, edits = migrated(SPAWN)
    expected = (
        SPAWN.replace("mp.spawn(function, args=(world_size, 0.1), nprocs=world_size, join=True)", "CALL")
        .replace('("gloo", rank=rank, world_size=world_size)', '("hvdlite")')
        .replace("as mp\n", "as mp\nimport hvdlite_torch as hvd\n")
        .replace("    CALL", "    hvd.init()\n    function(hvd.rank(), hvd.size(), 0.1)")
    )
    assert text == expected
    assert not by_hand(edits)


def test_spawn_by_device_counts_the_ranks_of_a_host() -> None:
    text, _ = migrated(
        "import torch\nimport torch.multiprocessing as mp\nimport torch.distributed as dist\n\n\n"
        "def work(gpu, per_node, args):\n    args.rank = args.rank * per_node + gpu\n"
        "    dist.init_process_group(args.backend, rank=args.rank, world_size=args.size)\n    use(args.rank)\n\n\n"
        "per_node = torch.cuda.device_count()\nmp.spawn(work, nprocs=per_node, args=(per_node, args))\n"
    )
    assert "hvd.init()\nwork(hvd.local_rank(), hvd.local_size(), args)\n" in text
    assert '    args.rank = hvd.rank()\n    dist.init_process_group("hvdlite")\n' in text


@pytest.mark.parametrize(
    ("old", "line", "said"),
    [
        ("dist.init_process_group(**options)", 3, "hvdlite"),
        ('dist.init_process_group("gloo", store=store)', 3, "store="),
        ("handle = torch.multiprocessing.spawn(train, nprocs=2)", 3, "hvdliterun starts the processes"),
        ("torch.multiprocessing.spawn(train, args=rest, nprocs=2)", 3, "hvdliterun starts the processes"),
        ('print(os.environ["MASTER_ADDR"])', 3, "MASTER_ADDR"),
        ('x = {k: os.environ[k] for k in ("RANK", "WORLD_SIZE")}', 3, "torchrun"),
        ('os.environ.update({"RANK": "0"})', 3, "RANK"),
        ('r = int(os.environ["SLURM_PROCID"])', 3, "SLURM_PROCID"),
        ("import torch.distributed.rpc as rpc\nrpc.init_rpc('a')", 4, "RPC"),
    ],
)
def test_what_is_left_to_do_by_hand_is_said_and_left_alone(old: str, line: int, said: str) -> None:
    program = DISTRIBUTED.replace("import os", "import os, torch") + old + "\n"
    text, edits = migrated(program)
    assert text == program
    assert said in by_hand(edits)[line]


def test_only_what_changes_changes() -> None:
    program = (
        "#!/usr/bin/env python\n# coding: utf-8\n'''Text.'''\n\nimport  os\n\nimport torch.distributed as dist\nimport re\n"
        "dist.init_process_group(  # the first\n    'nccl')   # after\nx  =  {1:2}  # odd   spaces\n"
    ).replace("\n", "\r\n")
    text, edits = migrated(program)
    assert text == (
        program.replace(
            "dist.init_process_group(  # the first\r\n    'nccl')", 'dist.init_process_group("hvdlite")'
        ).replace("re\r\n", 're\r\nimport hvdlite_torch  # noqa: F401  (it enters the backend "hvdlite")\r\n')
    )
    assert "comment" in edits.notes[0].text


# ---- the other three ----


def test_horovod() -> None:
    text, edits = migrated(
        "import os, horovod.torch as hvd\nfrom horovod.torch.elastic import ElasticSampler as S\nimport horovod\n"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\nimport horovod.spark\n"
        "from horovod import torch as again\nhorovod.run(f, np=2)\nhvd.init()\nhvd.no_such_thing()\nhvd.allgather(x)\n",
        "horovod",
    )
    assert text == (
        "import os, hvdlite_torch as hvd\nfrom hvdlite_torch.elastic import ElasticSampler as S\n"
        "import hvdlite.compat.runner\nfrom hvdlite.elastic import HorovodInternalError, HostsUpdatedInterrupt\n"
        "import horovod.spark\n"
        "import hvdlite_torch as again\nhvdlite.compat.runner.run(f, np=2)\nhvd.init()\nhvd.no_such_thing()\n"
        "hvd.allgather(x)\n"
    )
    found = by_hand(edits)
    assert set(found) == {5, 9}
    assert "Spark" in found[5] and "no_such_thing" in found[9]
    assert any(note.line == 10 and "gradients" in note.text for note in edits.notes)


def test_a_module_of_horovod_by_its_whole_name() -> None:
    text, edits = migrated("import horovod.torch\n\nhorovod.torch.init()\nprint(horovod.torch.rank())\n", "horovod")
    assert text == "import hvdlite_torch\n\nhvdlite_torch.init()\nprint(hvdlite_torch.rank())\n"
    assert not by_hand(edits)


def test_tf_distribute() -> None:
    text, edits = migrated(
        "import json, os\nimport tensorflow as tf\n\ncluster = {'worker': ['a:1', 'b:1']}\n"
        "os.environ['TF_CONFIG'] = json.dumps({'cluster': cluster})\nconfig = json.loads(os.environ['TF_CONFIG'])\n"
        "batch = 64 * len(config['cluster']['worker'])\nstrategy = tf.distribute.MultiWorkerMirroredStrategy(options)\n"
        "if config['task']['index'] == 0:\n    model.save('a')\nmodel.save_weights('b')\n"
        "other = tf.distribute.experimental.ParameterServerStrategy(x)\n",
        "tf.distribute",
    )
    assert text == (
        "import json, os\nimport tensorflow as tf\nimport hvdlite_tf as hvd\n\ncluster = {'worker': ['a:1', 'b:1']}\n"
        "hvd.init()\nbatch = 64 * hvd.size()\nstrategy = hvd.Strategy()\nif hvd.rank() == 0:\n    model.save('a')\n"
        "model.save_weights('b')\nother = tf.distribute.experimental.ParameterServerStrategy(x)\n"
    )
    assert set(by_hand(edits)) == {11, 12}


def test_accelerate() -> None:
    text, edits = migrated(
        "from accelerate import Accelerator, notebook_launcher\nfrom transformers import TrainingArguments\n\n\n"
        "class Own(TrainingArguments):\n    pass\n\n\ndef main():\n    if x:\n        a = Accelerator(cpu=True)\n"
        "    b = Own('out')\n\n\nnotebook_launcher(main)\n",
        "accelerate",
    )
    assert "TrainingArguments\nimport hvdlite_torch.accelerate\n" in text
    assert "    if x:\n        hvdlite_torch.accelerate.prepare()\n        a = " in text
    assert "    hvdlite_torch.accelerate.prepare()\n    b = Own('out')\n" in text
    assert set(by_hand(edits)) == {15}


# ---- the command ----


def test_the_diff_is_one_that_patch_takes_and_the_file_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, output = Path("train.py"), Path("new.py")
    path.write_text(SPAWN.rstrip("\n"))  # the last line has no end
    assert main(["migrate", "train.py", "--output", "new.py"]) == 0
    assert path.read_text() == SPAWN.rstrip("\n")
    out = capsys.readouterr().out
    assert "# Start: hvdliterun -np 4 python new.py" in out and "#   line 18: " in out
    subprocess.run(["patch", "-p0"], input=out, text=True, check=True, capture_output=True)
    assert path.read_text() == output.read_text() == migrated(SPAWN.rstrip("\n"))[0]
    for same in ("new.py", "train.py"):
        assert main(["migrate", "train.py", "--output", same]) == 2
        assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("x = (\n", 2, r"line 1: .*never closed"),
        ("x = 1\ny = 2 3\n", 2, "line 2: "),
        ("x = 1\0\n", 2, "null byte"),
        ("import torch\n", 1, "uses none of DDP"),
        ("import hvdlite\n", 1, "already, in line 1"),
        (
            "import horovod.torch as hvd\nimport torch.distributed as dist\ndist.init_process_group()\n",
            1,
            r"(?s)torch.distributed in line 3: say --from ddp.*Horovod in line 1",
        ),
    ],
)
def test_programs_that_are_refused(
    text: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert main(["migrate", str(path)]) == code
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and not captured.out
    if code == 1 and "horovod" in text:
        assert main(["migrate", str(path), "--from", "horovod"]) == 0
        assert "+import hvdlite_torch as hvd" in capsys.readouterr().out


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(b"# coding: nothing\n")
    for path in (tmp_path, tmp_path / "none.py", tmp_path / "odd.py"):
        with pytest.raises(ArgumentError, match="cannot be read"):
            Program.read(path)


# ---- a round trip ----

ROWS, STEPS, RATE = 8, 20, 0.1
DATA = f"""
x = np.random.default_rng(0).normal(size=({ROWS}, 3)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25
"""
TORCH = f"""
import numpy as np
import torch
{DATA}
model = torch.nn.Linear(3, 1)
torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
"""
LOOP = f"""
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
PREPARE
for _ in range({STEPS}):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        BACKWARD
        optimizer.step()
print("weights", *(p.tolist() for p in model.parameters()))
"""
PLAIN = LOOP.replace("BACKWARD", "loss.backward()")
WHOLE = {
    "ddp": f"""
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
{TORCH}
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
sampler = torch.utils.data.DistributedSampler(data, shuffle=False, rank=rank)
loader = torch.utils.data.DataLoader(data, {ROWS} // dist.get_world_size(), sampler=sampler)
model = DDP(model)
{PLAIN.replace("PREPARE", "")}
dist.destroy_process_group()
""",
    "horovod": f"""
import horovod.torch as hvd
{TORCH}
hvd.init()
sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
loader = torch.utils.data.DataLoader(data, {ROWS} // hvd.size(), sampler=sampler)
{PLAIN.replace("PREPARE", "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())")}
""",
    "accelerate": f"""
from accelerate import Accelerator
{TORCH}
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(data, {ROWS} // accelerator.num_processes)
{
        LOOP.replace("BACKWARD", "accelerator.backward(loss)").replace(
            "PREPARE", "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        )
    }
""",
    "tf.distribute": f"""
import keras
import numpy as np
import tensorflow as tf
{DATA}
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD({RATE}), loss="mse")
model.fit(x, y, batch_size={ROWS}, epochs={STEPS}, shuffle=False, verbose=0)
print("weights", *(w.ravel().tolist() for w in model.get_weights()))
""",
}


@pytest.mark.costly
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(kind) if kind == "accelerate" else ()) for kind in WHOLE]
)
def test_the_new_program_trains_as_one_process_would(kind: str, tmp_path: Path, start: Start) -> None:
    new, edits = migrated(WHOLE[kind], kind)
    assert not by_hand(edits)
    (tmp_path / "new.py").write_text(new)
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    ended = start("-np", "2", sys.executable, "new.py", cwd=tmp_path, env=environ).end(2 * LIMIT)
    assert ended.code == 0, ended.err
    found = re.findall(r"weights (.*)", ended.out)
    assert len(found) == 2

    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5]]) + 0.25
    weight, bias = np.zeros((3, 1)), 0.0
    for _ in range(STEPS):  # gradient descent on the mean square, written out
        error = x @ weight + bias - y
        weight, bias = weight - RATE * 2 / ROWS * (x.T @ error), bias - RATE * 2 * error.mean()
    for line in found:
        values = np.array([float(each) for each in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", line)])
        np.testing.assert_allclose(values, [*weight.ravel(), bias], atol=1e-5)
