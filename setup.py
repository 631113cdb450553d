"""The metadata that must be computed. pyproject.toml has the rest."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "hvdlite/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

# The registry's page of the project has no other pages beside it: links to these lead to the site. As long as none is
# published, they become names.
SITE = re.search(r'^site_url: "(.*)"', (HERE / "docs/site/mkdocs.yml").read_text(), re.MULTILINE)[1]
README = (HERE / "README.md").read_text()
if SITE:
    README = re.sub(r"\]\(docs/([\w/]+)\.md(#[^)]*)?\)", rf"]({SITE.rstrip('/')}/\1.html\2)", README)
README = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]*\)\n", "", README)  # nor has it their pictures
DESCRIPTION = re.sub(r"\[([^]]*)\]\((?!https?://)[^)]*\)", r"`\1`", README)


class BuildWithPages(build_py):
    """Puts the pages of the documentation into the wheel, for ``hvdlite docs``. An editable install reads them in ``docs``."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for page in (HERE / "docs").glob("*.md"):
                target = Path(self.build_lib, "hvdlite", "pages", page.name)
                target.parent.mkdir(exist_ok=True)
                self.copy_file(str(page), str(target))


EXTRAS = {
    "openmpi": ["openmpi>=5.0.8"],
    "mpich": ["mpich>=4.3"],
    "torch": ["torch>=2.6"],
    "tf": ["tensorflow>=2.18"],
    "tf-keras": ["tensorflow>=2.18", "tf_keras>=2.18"],
    "gpu": ["nvidia-nccl-cu13>=2.28; platform_system == 'Linux'"],
    "gpu-cu12": ["nvidia-nccl-cu12>=2.21; platform_system == 'Linux'"],
    "large-batch": ["pytorch-optimizer>=4"],
    "examples": ["scikit-learn", "tqdm", "matplotlib", "gymnasium", "tensorboard"],
    "serve": [
        *("starlette>=1", "uvicorn>=0.40", "uvloop>=0.21", "httptools>=0.6"),
        *("orjson>=3.10", "msgpack>=1", "prometheus_client>=0.20"),
    ],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings-python>=2", "ruff"],
    "completion": ["shtab>=1.7"],
    "frameworks": ["lightning>=2.6", "accelerate>=1.15", "transformers>=5"],
}
EXTRAS["test"] = [
    *EXTRAS["openmpi"],
    *EXTRAS["torch"],
    *EXTRAS["tf-keras"],
    *EXTRAS["large-batch"],
    *EXTRAS["examples"],
    *EXTRAS["serve"],
    *EXTRAS["completion"],
    "array-api-strict",
    "httpx",
    "hypothesis",
    "ipykernel",
    "nbclient",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "safetensors",
    "tritonclient[http]",
    "pyyaml",
]
EXTRAS["dev"] = [
    *EXTRAS["test"],
    *EXTRAS["docs"],
    "build",
    "check-wheel-contents",
    "mypy",
    "ruff",
    "setuptools>=77",
    "twine",
    "types-tqdm",
]
EXTRAS["all"] = sorted(
    {need for name in ("openmpi", "torch", "tf", "large-batch", "examples", "serve") for need in EXTRAS[name]}
)

setup(
    version=VERSION,
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    project_urls={"Homepage": "https://pypi.org/project/hvdlite/", **({"Documentation": SITE} if SITE else {})},
    package_dir={"": "."},  # so that an editable install is a line in a .pth file, which type checkers follow
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithPages},
)
