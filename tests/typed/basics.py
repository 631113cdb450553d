"""The names that every package has. The test checks this program with each package in the place of `hvdlite`."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import assert_type

import hvdlite as hvd


def who() -> int:
    """Where this rank is."""
    if not hvd.is_initialized():
        hvd.init()
    assert_type(hvd.is_initialized(), bool)
    assert_type(hvd.rank(), int)
    assert_type(hvd.size(), int)
    assert_type(hvd.local_rank(), int)
    assert_type(hvd.local_size(), int)
    assert_type(hvd.cross_rank(), int)
    assert_type(hvd.cross_size(), int)
    assert_type(hvd.is_homogeneous(), bool)
    assert_type(hvd.is_server(), bool)
    assert_type(hvd.mpi_threads_supported(), bool)
    assert_type(hvd.describe(), str)
    handle = hvd.barrier_async()
    assert_type(handle, hvd.Handle[None])
    handle.wait()
    return hvd.rank()


def sets() -> list[int]:
    """Process sets and grids."""
    everybody: hvd.ProcessSet = hvd.global_process_set
    first = hvd.add_process_set([0])
    assert_type(first, hvd.ProcessSet)
    assert_type(first.ranks, list[int])
    assert_type(hvd.remove_process_set(first), bool)
    assert_type(hvd.new_group([0]), hvd.ProcessSet)
    grid = hvd.ProcessGrid(dp=hvd.size())
    assert_type(grid["dp"], hvd.ProcessSet)
    return everybody.ranks


def timeline(path: Path) -> None:
    """A timeline of some steps."""
    hvd.start_timeline(path, mark_cycles=True)
    hvd.stop_timeline()


def values() -> list[hvd.ReduceOp]:
    """What operations and optimizers take."""
    dcasgd: hvd.DCASGD = hvd.DCASGD(strength=0.1)
    staleness: hvd.StalenessRate = hvd.StalenessRate()
    assert_type(dcasgd.strength, float)
    assert_type(staleness.rate(2), float)
    hvd.Compression.powersgd(rank=4)
    hvd.Compression.topk(0.01)
    return [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum]


def failing(what: str) -> str:
    """Errors, those that derive from others first."""
    try:
        hvd.shutdown()
        return what
    except (hvd.MismatchError, hvd.PeerLeftError) as error:
        return f"ranks differ: {error}"
    except (hvd.CommunicationError, hvd.HorovodInternalError) as error:
        return f"connection: {error}"
    except (hvd.ArgumentError, hvd.UnsupportedTensorError, hvd.DuplicateNameError, hvd.NotYetError) as error:
        return f"program: {error}"
    except (hvd.NotInitializedError, hvd.WorldSizeError, hvd.ThreadLevelError, hvd.LaunchError) as error:
        return f"start: {error}"
    except (hvd.CheckpointError, hvd.OutOfSyncError, hvd.WorkerError) as error:
        return f"training: {error}"
    except hvd.HvdliteError as error:
        return str(error)
