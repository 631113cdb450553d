"""`hvdlite.DistributedGradient` against closed forms: trees of NumPy arrays, weights, uneven data, mistakes."""

from __future__ import annotations

import collections
import contextvars
import threading
import time
from typing import Any, NamedTuple

import array_api_strict
import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd
import hvdlite.gradients.bucket
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, UnsupportedTensorError
from hvdlite.tensors.array_api import _beside
from tests.conftest import UNDER_MPI
from tests.support import lossy_reference

SHAPES = {"w": (5, 3), "b": (3,), "scale": (), "empty": (0, 4)}
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture(params=[0, 2**14], ids=["large", "small"])
def large(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether arrays are summed where the program has them."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


def of_rank(rank: int, step: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Small whole numbers over 4: exact in every dtype, and so are their sums."""
    random = np.random.default_rng([rank, step])
    return {name: np.asarray(random.integers(-8, 9, shape) / 4, dtype) for name, shape in SHAPES.items()}


def total(size: int, step: int, weights: Any = None) -> dict[str, np.ndarray]:
    """The sum over the ranks, in float64; times the weights."""
    shares = [1.0] * size if weights is None else weights
    return {
        name: sum(np.asarray(of_rank(r, step)[name], np.float64) * share for r, share in enumerate(shares))
        for name in SHAPES
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.usefixtures("large")
def test_averages_and_sums(ranks: Any, dtype: Any, inplace: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for op in (hvd.Average, hvd.Sum):
            combine = hvd.DistributedGradient(op, inplace=inplace)
            held = []
            for step in range(4):
                own = of_rank(rank, step, dtype)
                before = {name: array.copy() for name, array in own.items()}
                found = combine(own)
                expected = total(size, step)
                for name, array in found.items():
                    assert array.dtype == dtype and array.shape == SHAPES[name]
                    assert (array is own[name]) == inplace
                    tolerance = {np.float16: 2**-11, ml_dtypes.bfloat16: 2**-8}.get(dtype, 1e-6)
                    wanted = expected[name] / (size if op is hvd.Average else 1)
                    np.testing.assert_allclose(array.astype(np.float64), wanted, rtol=tolerance)
                    if not inplace:
                        np.testing.assert_array_equal(own[name], before[name])
                        array *= 0  # the program's own: neither other ranks' results nor later ones change
                held.append(found)
            assert inplace or all((array == 0).all() for tree in held for array in tree.values())

    ranks(check)


@pytest.mark.usefixtures("large")
def test_weights_give_the_gradient_of_the_joined_batch(ranks: Any) -> None:
    """Who has no samples says 0, and may hold anything."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient()
        shares = [1.0] if size == 1 else np.arange(size) / np.arange(size).sum()
        for step in range(3):
            own = of_rank(rank, step)
            if size > 1 and rank == 0:
                own = {name: np.full_like(array, np.nan) for name, array in own.items()}
            found = combine(own, weight=7.0 if size == 1 else rank)
            for name, expected in total(size, step, shares).items():
                np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6)
        if size > 1:
            with pytest.raises(HvdliteError, match="weights of all ranks add up to 0"):
                combine(own, weight=0)
            np.testing.assert_allclose(combine(of_rank(rank))["b"], total(size, 0)["b"] / size, rtol=1e-6)

    ranks(check)


def test_structures_come_back(ranks: Any) -> None:
    def check() -> None:
        size, one = hvd.size(), np.ones(2, np.float32)
        tree = {
            "list": [one, (one, one.astype(np.float64))],
            "pair": Pair(one, {"inner": one}),
            "none": None,
            "nothing": [],
            3: np.float32(1.0),
        }
        combine = hvd.DistributedGradient(hvd.Sum)
        for _ in range(2):
            found = combine(tree)
            assert list(found) == list(tree)
            assert type(found["list"][1]) is tuple and type(found["pair"]) is Pair
            assert found["none"] is None and found["nothing"] == []
            assert found["list"][1][1].dtype == np.float64
            assert isinstance(found[3], np.float32) and found[3] == size
            for leaf in (found["list"][0], found["pair"].first, found["pair"].second["inner"]):
                np.testing.assert_array_equal(leaf, [size, size])
        ordered = combine(collections.OrderedDict(z=one, a=None))
        assert type(ordered) is collections.OrderedDict and list(ordered) == ["z", "a"]
        np.testing.assert_array_equal(hvd.DistributedGradient(hvd.Sum)(one), [size, size])
        assert combine({}) == {} and combine([None]) == [None]
        np.testing.assert_array_equal(combine([one])[0], [size, size])

    ranks(check)


def test_gradients_that_some_ranks_have(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient(hvd.Sum, inplace=True)
        ones = np.ones(3)
        for step in range(4):
            # From step 2 on the first has a gradient where nobody had one.
            own = [ones * 2 if rank == size - 1 else None, None, ones.copy() if step > 1 and rank == 0 else None]
            found = combine(own)
            np.testing.assert_array_equal(found[0], ones * 2)
            assert found[1] is None
            if step > 1:
                np.testing.assert_array_equal(found[2], ones)
            else:
                assert found[2] is None

    ranks(check)


def test_other_frameworks_tensors(ranks: Any) -> None:
    """Come back as what they were; also where a rank has none, if it has another gradient of that framework."""
    torch = pytest.importorskip("torch")

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient(hvd.Sum)
        for dtype in (torch.bfloat16, torch.float32):
            tree = {"here": torch.ones(3), "some": torch.full((2, 2), 2.0, dtype=dtype) if rank == 0 else None}
            found = combine(tree)
            assert found["some"].dtype == dtype and (found["some"] == 2).all() and (found["here"] == size).all()
        kept = torch.ones(3)
        assert hvd.DistributedGradient(hvd.Sum, inplace=True)([kept])[0] is kept and (kept == size).all()

    ranks(check)


def test_arrays_of_the_array_api(ranks: Any) -> None:
    """What JAX' arrays are as well: read by DLPack, never written into, on a device of their own."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        device = array_api_strict.Device("device1")
        own = {
            "w": array_api_strict.asarray([float(rank), 1.0]),
            "some": array_api_strict.ones(2) if rank == size - 1 else None,
        }
        for step in range(2):
            found = hvd.DistributedGradient(hvd.Sum)(own)
            assert all(type(array) is type(own["w"]) for array in found.values()), step
            np.testing.assert_array_equal(np.asarray(found["w"]), [size * (size - 1) / 2, size])
            np.testing.assert_array_equal(np.asarray(found["some"]), [1, 1])
        elsewhere = array_api_strict.zeros(3, device=device)
        assert _beside(array_api_strict.ones(3), elsewhere).device == device
        with pytest.raises(UnsupportedTensorError, match="cannot be changed in place"):
            hvd.DistributedGradient(inplace=True)(own)

    ranks(check)


def test_a_rank_without_data_joins(ranks: Any) -> None:
    """It has fewer batches, or none at all; afterwards it goes on with what the others know."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient()
        for epoch in range(2):
            for step in range(3 * rank):  # rank 0 has nothing, and the last rank has the most
                found = combine(of_rank(rank, step))
                others = [r for r in range(size) if 3 * r > step]
                for name in SHAPES:
                    expected = sum(of_rank(r, step)[name] for r in others) / len(others)
                    np.testing.assert_allclose(found[name], expected, rtol=1e-6)
            assert hvd.join() == size - 1
            found = combine(of_rank(rank, epoch))  # of the same layout, which rank 0 had never seen
            np.testing.assert_allclose(found["w"], total(size, epoch)["w"] / size, rtol=1e-6)

    ranks(check)


def test_a_join_that_is_refused_takes_part_in_nothing(ranks: Any) -> None:
    """A second thread of a rank that has joined may not join: it must not stand in for gradients either."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        late = hvd.new_group(range(size))
        combine = hvd.DistributedGradient()
        np.testing.assert_array_equal(combine(np.full(3, rank + 1.0)), np.full(3, (size + 1) / 2))
        if rank == 0 and size > 1:
            thread = threading.Thread(target=contextvars.copy_context().run, args=(hvd.join,))
            thread.start()
            engine = world().engine()
            while thread.is_alive() and not engine.has_joined:
                time.sleep(0.001)
            with pytest.raises(HvdliteError, match="has called join"):
                hvd.join()
            hvd.barrier(process_set=late)
            thread.join()
        else:
            hvd.barrier(process_set=late)
            hvd.join()
        for _ in range(2):
            np.testing.assert_array_equal(combine(np.full(3, rank + 1.0)), np.full(3, (size + 1) / 2))
            hvd.join()
        hvd.remove_process_set(late)

    ranks(check)


def test_two_of_them(ranks: Any) -> None:
    """For two models of one layout and one of another, in turn."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sums, means, others = (hvd.DistributedGradient(op) for op in (hvd.Sum, hvd.Average, hvd.Sum))
        for step in range(3):
            own = of_rank(rank, step)
            for combine, divisor in ((sums, 1), (means, size)):
                np.testing.assert_allclose(combine(own)["w"], total(size, step)["w"] / divisor, rtol=1e-6)
            np.testing.assert_array_equal(others([np.float64([rank, 1])])[0], [size * (size - 1) / 2, size])

    ranks(check)


def test_mistakes_are_told_on_all_ranks(ranks: Any) -> None:
    """In the first call, and in a later one, of one rank alone; and the next call that fits works."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        one, last = np.ones(3), rank == size - 1
        wrong = [
            (
                {"a": one, "c": one} if last else {"a": one, "b": one},
                r"different structures: \['b'\] is on rank 0 and not",
            ),
            ([one, one] if last else (one, one), "tuple of 2 on rank 0, list of 2 on rank"),
            (
                {"a": np.ones(4) if last else one},
                r"at \['a'\]: float64 of shape \(3,\) on rank 0, and float64 of shape \(4,",
            ),
            ([one.astype(np.float32) if last else one], r"at \[0\]: float64 of shape \(3,\) on rank 0, and float32"),
        ]
        for gradients, words in wrong:
            for used in (False, True):
                combine = hvd.DistributedGradient(hvd.Sum)
                if used:
                    combine([one])
                if size > 1:
                    with pytest.raises(MismatchError, match=words):
                        combine(gradients)
                np.testing.assert_array_equal(combine([one])[0], one * size)

    ranks(check)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=str)
def test_compression_and_adasum(ranks: Any, op: Any) -> None:
    def check() -> None:
        size = hvd.size()
        combine = hvd.DistributedGradient(op, compression=hvd.Compression.fp16)
        equal = [np.array([0.5, -2.0, 3.0], np.float32), np.array([4.0])]
        for _ in range(2):
            found = combine(equal)  # equal on all ranks: the mean is the same, and so is Adasum's result
            for array, expected in zip(found, equal, strict=True):
                assert array.dtype == expected.dtype
                np.testing.assert_allclose(array, expected, rtol=2**-10)
        if op is hvd.Average and size > 1:
            big = hvd.DistributedGradient(compression=hvd.Compression.fp16, gradient_predivide_factor=64.0)
            np.testing.assert_allclose(big([np.array([1e5])])[0], [1e5], rtol=2**-10)

    ranks(check)


@pytest.mark.parametrize("inplace", [False, True])
def test_few_bytes(ranks: Any, inplace: bool) -> None:
    """The formula says what comes out, with weights; a rank that joins before any exchange takes part without data."""

    def gradients(step: int, rank: int) -> dict[str, Any]:
        chance = np.random.default_rng([step, rank])
        return {"a": chance.standard_normal((12, 10)), "b": chance.standard_normal(3), "c": None}

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient(compression=hvd.Compression.powersgd(rank=2), inplace=inplace)
        if rank or size == 1:
            truth, samples = lossy_reference.powersgd(2), [float(r or size == 1) * (1 + r) for r in range(size)]
            for step in range(4):
                found = combine(gradients(step, rank), weight=samples[rank])
                everybody = [[gradients(step, r)[name] for name in "ab"] for r in range(size)]
                for name, expected in zip("ab", truth(everybody, samples), strict=True):
                    np.testing.assert_allclose(found[name], expected, atol=1e-12)
                assert found["c"] is None
            with pytest.raises(ArgumentError, match=r"powersgd.*gradient 0 is now float64 of shape \(4,\), and was"):
                combine({"a": np.ones(4), "b": np.ones(3), "c": None})
        hvd.join()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_process_set(ranks: Any) -> None:
    def check() -> None:
        some = hvd.add_process_set(range(hvd.size() - 1))
        if hvd.rank() < hvd.size() - 1:
            found = hvd.DistributedGradient(hvd.Sum, some)([np.float64([hvd.rank() + 1])])
            np.testing.assert_array_equal(found[0], [hvd.size() * (hvd.size() - 1) / 2])
        else:
            with pytest.raises(ArgumentError, match="is not in ProcessSet"):
                hvd.DistributedGradient(hvd.Sum, some)
        hvd.remove_process_set(some)

    ranks(check)


def test_arguments(ranks: Any) -> None:
    def check() -> None:
        combine = hvd.DistributedGradient()
        with pytest.raises(ArgumentError, match="combined by Average or Sum"):
            hvd.DistributedGradient(hvd.Max)
        with pytest.raises(ArgumentError, match="weight=-1: expected the number"):
            combine([np.ones(1)], weight=-1)
        with pytest.raises(ArgumentError, match="for averages"):
            hvd.DistributedGradient(hvd.Sum)([np.ones(1)], weight=2)
        with pytest.raises(UnsupportedTensorError, match=r"Wrap numbers and lists as numpy\.array"):
            combine([1.0])
        with pytest.raises(UnsupportedTensorError, match="gradients are floating-point numbers"):
            combine([np.ones(2, int)])
        read_only = np.ones(2)
        read_only.flags.writeable = False
        with pytest.raises(UnsupportedTensorError, match="read-only"):
            hvd.DistributedGradient(inplace=True)([read_only])

    ranks(check)


def test_training_equals_one_process(ranks: Any) -> None:
    """Logistic regression on shares of different sizes, against the joined batch."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        random = np.random.default_rng(0)
        x, y = random.normal(size=(30, 4)), random.integers(0, 2, 30)

        def gradient(weights: np.ndarray, rows: slice) -> np.ndarray:
            chance = 1 / (1 + np.exp(-x[rows] @ weights))
            result: np.ndarray = x[rows].T @ (chance - y[rows]) / len(y[rows])
            return result

        bounds = [0, *(30 * (r + 1) // (size + r % 2) for r in range(size - 1)), 30]
        mine = slice(bounds[rank], bounds[rank + 1])
        combine, alone, together = hvd.DistributedGradient(), np.zeros(4), np.zeros(4)
        for _ in range(10):
            alone = alone - gradient(alone, slice(0, 30))
            together = together - combine(gradient(together, mine), weight=mine.stop - mine.start)
        np.testing.assert_allclose(together, alone, rtol=1e-12)

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="JAX's devices belong to one process")
def test_jax_arrays_and_containers(ranks: Any) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed, whose arrays this is about")

    def check() -> None:
        size = hvd.size()
        tree = {"w": jax.numpy.ones((2, 3)), "half": jax.numpy.ones(2, "bfloat16"), "none": None}
        found = hvd.DistributedGradient(hvd.Sum)(tree)
        assert found["none"] is None and all(isinstance(found[name], jax.Array) for name in ("w", "half"))
        assert found["half"].dtype == "bfloat16" and (found["half"] == size).all() and (found["w"] == size).all()
        assert found["w"].devices() == tree["w"].devices()
        with pytest.raises(UnsupportedTensorError, match="cannot be changed in place"):
            hvd.DistributedGradient(inplace=True)(tree)

    ranks(check)
