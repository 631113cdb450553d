"""``horovod.common.util`` has small functions that other projects use. `hvdlite.adapter.capabilities` describes ``…_built``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hvdlite.adapter import capabilities
from hvdlite.compat.common.exceptions import HorovodVersionMismatchError
from hvdlite.errors import ArgumentError, MissingPackageError, NotYetError

__all__ = ["HorovodVersionMismatchError"]

T = TypeVar("T")

_cache = functools.cache
"""A decorator that calls the function only once for each list of arguments. Other projects import it."""

_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "keras"}


def get_ext_suffix() -> str:
    """Return the suffix of compiled Python modules' file names, such as ".cpython-311-x86_64-linux-gnu.so"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Raise NotYetError always: hvdlite has no compiled module whose path could be returned."""
    raise NotYetError(f"hvdlite has no compiled modules, so none of {'/'.join(args) or pkg_path}: remove the call.")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that the framework of a module of Horovod is installed. hvdlite compiles nothing, so that is enough.

    Args:
        ext_name: The name of the module, such as "horovod.torch".
        ext_env_var: Ignored, like `pkg_path` and `args`.

    Raises:
        MissingPackageError: The framework is not installed, or hvdlite does not support it. This is an ImportError.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise MissingPackageError(
            f"{ext_name} needs {framework}, which is not installed, or which hvdlite does not support.", framework
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether a framework is installed. For frameworks that hvdlite does not support, such as "mxnet", it is False.

    Args:
        ext_base_name: The framework, "torch", "tensorflow" or "keras".
        verbose: Print the answer too.
    """
    name = _FRAMEWORKS.get(ext_base_name)
    found = name is not None and importlib.util.find_spec(name) is not None
    if verbose:
        print(f"hvdlite: {ext_base_name}: {'installed' if found else 'not installed, or not supported'}")
    return found


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether a framework is installed and hvdlite can exchange tensors in the memory of a GPU.

    Args:
        ext_base_name: The framework, "torch", "tensorflow" or "keras".
        verbose: Print whether the framework is installed.
    """
    return extension_available(ext_base_name, verbose) and (capabilities.cuda_built() or capabilities.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    """Tell whether MPI can be used. `verbose` changes nothing, here and in the functions below."""
    return capabilities.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return False: hvdlite does not use Gloo."""
    return capabilities.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Tell whether NCCL can be used."""
    return bool(capabilities.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """Return False: hvdlite does not use IBM's DDL."""
    return capabilities.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False: hvdlite does not use oneCCL."""
    return capabilities.ccl_built()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Change environment variables while the body runs.

    Args:
        kwargs: The value of each variable, by its name; None removes the variable.
    """
    before = {name: os.environ.get(name) for name in kwargs}
    _set_variables(kwargs)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return a function ``(op, average)`` that chooses the reduction of a program that passes one of them, or none.

    Args:
        reduce_ops: An object with the attributes ``Average`` and ``Sum``.

    Returns:
        The function. It returns `op` if it is given, ``Sum`` if `average` is False, and else ``Average``. If both are given,
        it raises ArgumentError, which is a ValueError.
    """

    def handle_average(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ArgumentError(f"op={op} and average={average}: give `op` alone, `average` is its old form.")
        if op is not None:
            return op
        return reduce_ops.Sum if average is False else reduce_ops.Average

    return handle_average


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  # Horovod's name
    """Cut a sequence into `n` runs whose lengths differ by one at most, the longer ones first."""
    ends = [len(l) // n * part + min(part, len(l) % n) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: hvdlite is not built against a version of a framework, so no version is wrong.

    Args:
        name: The name of the framework.
        version: The version of the framework.
        exception: The exception because of which the caller asks.
    """


def is_iterable(x: Any) -> bool:
    """Tell whether `x` is iterable, by its class."""
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Tell whether the version `ver` is `target` or a later one.

    Versions are compared by their three numbers; a suffix ("rc1", "+cpu") does not count.

    Args:
        ver: A version, such as "2.13.0+cpu".
        target: A version, such as "2.6.0".

    Raises:
        ArgumentError: A version does not begin with three numbers.
    """
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if match is None:
        raise ArgumentError(f"version {version!r}: expected three numbers, such as '2.6.0'.")
    return tuple(map(int, match.groups()))
