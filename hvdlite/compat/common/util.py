"""``horovod.common.util``: small functions that other projects use. ``…_built``: see `hvdlite.adapter.capabilities`."""

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
"""A decorator: call the function once for each list of arguments. Other projects import it."""

_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "keras"}


def get_ext_suffix() -> str:
    """The end of the names of compiled Python modules, such as ".cpython-311-x86_64-linux-gnu.so"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Raises: there is no compiled module whose path could be told.

    Raises:
        NotYetError: Always.
    """
    raise NotYetError(f"hvdlite has no compiled modules, so none of {'/'.join(args) or pkg_path}: remove the call.")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Pass if the framework of a Horovod module can be used. Nothing is compiled, so it needs to be installed and no more.

    Args:
        ext_name: Such as "horovod.torch".
        ext_env_var: Ignored, as what follows.
        pkg_path: Ignored.
        args: Ignored.

    Raises:
        MissingPackageError: An ImportError: the framework is not installed, or is not one of hvdlite's.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise MissingPackageError(
            f"{ext_name} needs {framework}, which is not installed, or which hvdlite does not support.", framework
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("torch", "tensorflow" or "keras") is installed. Others, such as "mxnet", are not supported.

    Args:
        ext_base_name: The framework.
        verbose: Print the answer too.
    """
    name = _FRAMEWORKS.get(ext_base_name)
    found = name is not None and importlib.util.find_spec(name) is not None
    if verbose:
        print(f"hvdlite: {ext_base_name}: {'installed' if found else 'not installed, or not supported'}")
    return found


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether tensors in the memory of a GPU can be exchanged, of a framework that is there; arguments as above."""
    return extension_available(ext_base_name, verbose) and (capabilities.cuda_built() or capabilities.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI can be used; `verbose` changes nothing here and below."""
    return capabilities.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """False: Gloo is not used."""
    return capabilities.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether NCCL is used."""
    return bool(capabilities.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """False: IBM's DDL is not used."""
    return capabilities.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """False: oneCCL is not used."""
    return capabilities.ccl_built()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Change environment variables while the body runs.

    Args:
        kwargs: Values by name; None removes a variable.
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
    """A function ``(op, average)`` that gives the reduction meant by a program that passes one of both, or none.

    Args:
        reduce_ops: Whatever has the attributes ``Average`` and ``Sum``.

    Returns:
        The function. It raises ArgumentError, a ValueError, where both are given.
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
    """Pass: nothing is built against a framework's version, so none is wrong.

    Args:
        name: The framework.
        version: Its version.
        exception: What made the caller look.
    """


def is_iterable(x: Any) -> bool:
    """Whether one can loop over it."""
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare versions by their three numbers; what follows them ("rc1", "+cpu") does not count.

    Args:
        ver: Such as "2.13.0+cpu".
        target: Such as "2.6.0".

    Returns:
        Whether `ver` is `target` or later.

    Raises:
        ArgumentError: One of them does not begin with three numbers.
    """
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if match is None:
        raise ArgumentError(f"version {version!r}: expected three numbers, such as '2.6.0'.")
    return tuple(map(int, match.groups()))
