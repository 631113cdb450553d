"""examples/notebook.ipynb runs from its first cell to its last, in a kernel of Jupyter's."""

from __future__ import annotations

import os
import re

import pytest

from tests.support.jobs import PYTHONPATH, ROOT

LIMIT = 150
"""Seconds for one cell, of which the start of two ranks and of torch takes the most."""


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
# jupyter_client warns of its own use of paths and of event loops.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::ResourceWarning"
)
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed, which executes notebooks")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed, in which notebooks run")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    nbclient.NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute(cwd=os.fspath(ROOT))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.get("text", "") for output in outputs)
    right = re.search(r"(\d+) of 360 test images are right", said)
    assert right and int(right[1]) > 310, said
    assert "raised here: rank 1 has no data" in said
    assert any("image/png" in output.get("data", {}) for output in outputs)
