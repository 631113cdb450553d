"""The report on what a program uses of Horovod's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.compat import report
from hvdlite.compat.shell import of_shell
from hvdlite.compat.usage import Use, of_python


def names(text: str) -> dict[str, list[int]]:
    """The names that a program uses, with their lines."""
    found: dict[str, list[int]] = {}
    for use in of_python(text):
        if use.kind == "name":
            found.setdefault(use.name, []).append(use.line)
    return found


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [
        ("import horovod.torch as hvd\nhvd.init()", "horovod.torch.init", [2]),
        ("import horovod.torch\nhorovod.torch.init()", "horovod.torch.init", [2]),
        ("import horovod as h\nh.torch.mpi_ops.rank()", "horovod.torch.mpi_ops.rank", [2]),
        ("from horovod import torch as hvd\nhvd.rank()", "horovod.torch.rank", [2]),
        ("from horovod.torch import rank as r\nprint(r())", "horovod.torch.rank", [1, 2]),
        ("from horovod.torch import *", "horovod.torch", [1]),
        ("import horovod.torch as hvd\nother = hvd\nother.rank", "horovod.torch.rank", [3]),
        ("import horovod.torch as hvd\nx: object = hvd.mpi_ops\nx.rank", "horovod.torch.mpi_ops.rank", [3]),
        ("import horovod.torch as hvd\nif (x := hvd): x.rank", "horovod.torch.rank", [2]),
        ("def f():\n    return hvd.rank()\nimport horovod.torch as hvd", "horovod.torch.rank", [2]),
        ("def f():\n    import horovod.torch as hvd\n    return hvd.rank()", "horovod.torch.rank", [3]),
        ("import importlib\nh = importlib.import_module('horovod.torch')\nh.rank()", "horovod.torch.rank", [3]),
        ("import horovod.torch as hvd\ngetattr(hvd, 'rank')()", "horovod.torch.rank", [2]),
        ("import horovod.torch as hvd\ng = getattr(hvd, 'mpi_ops', None)\ng.rank", "horovod.torch.mpi_ops.rank", [3]),
        ("import horovod.torch as hvd\nf = lambda: hvd.rank()", "horovod.torch.rank", [2]),
        ("import horovod.torch as hvd\ndef f(x=hvd.rank()): pass", "horovod.torch.rank", [2]),
        ("import horovod.torch as hvd\n@hvd.elastic.run\ndef f(): pass", "horovod.torch.elastic.run", [2]),
        ("import horovod.torch as hvd\nhvd.Compression.fp16.compress", "horovod.torch.Compression.fp16.compress", [2]),
        (
            "import horovod.torch as hvd\nclass A:\n  def a(self): self.h = hvd\n  def b(self): self.h.rank()",
            "horovod.torch.rank",
            [4],
        ),
        (
            "import horovod.torch as hvd\no = hvd.DistributedOptimizer(p)\no.synchronize()",
            "horovod.torch.DistributedOptimizer().synchronize",
            [3],
        ),
        (
            "import horovod.torch as hvd\nhvd.DistributedOptimizer(p).skip_synchronize()",
            "horovod.torch.DistributedOptimizer().skip_synchronize",
            [2],
        ),
    ],
)
def test_names_are_followed(text: str, name: str, lines: list[int]) -> None:
    assert names(text)[name] == lines


def test_both_modules_that_a_name_may_be() -> None:
    text = "if tf:\n  import horovod.keras as hvd\nelse:\n  import horovod.torch as hvd\nhvd.rank()"
    assert {"horovod.keras.rank", "horovod.torch.rank"} <= set(names(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch as hvd\nhvd.rank()",
        "import horovod.torch as hvd\ndef f(hvd): return hvd.rank()",
        "import horovod.torch as hvd\nf = lambda hvd: hvd.rank()",
        "import horovod.torch as hvd\ngetattr(hvd, 'rank', None)",
        "import horovod.torch as hvd\nhasattr(hvd, 'rank')",
        "import horovod.torch as hvd\no = hvd.DistributedOptimizer(p)\no.rank()",
        "from .horovod.torch import rank\nrank()",
        '"""horovod.torch.rank"""  # horovod.torch.rank',
    ],
)
def test_what_is_not_horovods(text: str) -> None:
    assert not any(name.endswith(".rank") for name in names(text))


def test_arguments_and_variables() -> None:
    text = (
        "import os\nimport horovod.torch as hvd\nfrom horovod.common.util import env\n"
        "hvd.allreduce(x, average=False, **more)\n"
        "os.environ['HOROVOD_CYCLE_TIME'] = '1'\n"
        "with env(HOROVOD_TIMELINE='x'): 'HOROVOD_ in a sentence'\n"
    )
    uses = of_python(text)
    assert Use("argument", "horovod.torch.allreduce", 4, "average") in uses
    variables = [(use.name, use.line) for use in uses if use.kind == "variable"]
    assert variables == [("HOROVOD_CYCLE_TIME", 5), ("HOROVOD_TIMELINE", 6)]


def test_shell_scripts() -> None:
    text = (
        "#!/bin/sh\n# horovodrun --comment\nexport HOROVOD_FUSION_THRESHOLD=1\n"
        "horovodrun -np 4 --gloo \\\n  --log-level INFO -H a:2,b:2 python train.py --lr 1 -np\n"
        "cd x && /opt/bin/horovodrun --fusion-threshold-mb=32 --verbose sh -c 'x'\n"
    )
    uses = [(use.kind, use.name, use.line) for use in of_shell(text)]
    assert uses == [
        ("variable", "HOROVOD_FUSION_THRESHOLD", 3),
        *(("flag", flag, 4) for flag in ("-np", "--gloo", "--log-level", "-H")),
        *(("flag", flag, 6) for flag in ("--fusion-threshold-mb", "--verbose")),
    ]


GOOD = "import horovod.torch as hvd\nhvd.init()\nhvd.allreduce(x, name='x')\n"
BAD = "import horovod.torch as hvd\nhvd.nosuch()\nhvd.init(nosuch=1)\nhvd.nosuch(a=1)\nimport horovod.ray\n"


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed, whose names the report looks up")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "other.py").write_text("print('hello')\n")
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()[2:5]] == [
        ["1", "horovod.torch", "supported"],
        ["2", "horovod.torch.init", "supported"],
        ["3", "horovod.torch.allreduce", "supported"],
    ]
    assert out.endswith("1 of 2 files use Horovod: 3 supported, 0 changed, 0 missing.\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "bad.py").write_text(BAD)
    assert report.main([str(tmp_path)]) == 1
    rows = {row.name: row for row in report.rows_of(tmp_path / "deeper" / "bad.py")}
    assert rows["horovod.torch.nosuch"].lines == (2, 4)
    assert rows["horovod.torch.init(nosuch=)"].lines == (3,)
    assert "process_sets" in rows["horovod.torch.init(nosuch=)"].status.note
    assert "hvdlite.run" in rows["horovod.ray"].status.note
    assert {name for name, row in rows.items() if row.status.kind == "missing"} == {
        *("horovod.torch.nosuch", "horovod.torch.init(nosuch=)", "horovod.ray")
    }
    assert "2 of 3 files use Horovod" in capsys.readouterr().out


def test_report_on_a_script_without_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch").write_text("#!/usr/bin/env bash\nhorovodrun --min-np 2 --jsrun -np 4 train.py\n")
    assert report.main([str(tmp_path / "launch")]) == 1
    assert "--jsrun" in capsys.readouterr().out
    (tmp_path / "old.py").write_text("import horovod.torch\nprint 'hello'\n")
    assert report.main([str(tmp_path / "old.py")]) == 1
    assert "this is no Python" in capsys.readouterr().out
    (tmp_path / "old.py").write_text("print 'hello'\n")
    assert report.main([str(tmp_path / "old.py")]) == 0
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    assert report.main([str(tmp_path / "bytes.py")]) == 2
    assert "cannot read" in capsys.readouterr().err
