"""Tests as users wrote them for Horovod, with the standard library's unittest. The tests do not mention hvdlite."""

# ruff: noqa: PT009, PT027  # unittest, as in the programs that this file represents

import itertools
import os
import unittest
import warnings

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.common.util import env, gloo_built, mpi_built
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import allreduce_async_, poll, rank, size, synchronize


class OperationsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        hvd.init()

    def test_place(self):
        if "HOROVOD_RANK" in os.environ:
            self.assertEqual(int(os.environ["HOROVOD_RANK"]), hvd.rank())
            self.assertEqual(int(os.environ["HOROVOD_SIZE"]), hvd.size())
            self.assertEqual(int(os.environ["HOROVOD_LOCAL_RANK"]), hvd.local_rank())
            self.assertEqual(int(os.environ["HOROVOD_LOCAL_SIZE"]), hvd.local_size())
            self.assertEqual(int(os.environ["HOROVOD_CROSS_RANK"]), hvd.cross_rank())
            self.assertEqual(int(os.environ["HOROVOD_CROSS_SIZE"]), hvd.cross_size())
        self.assertEqual((rank(), size()), (hvd.rank(), hvd.size()))
        self.assertTrue(hvd.is_initialized())

    def test_build(self):
        self.assertTrue(mpi_built(verbose=True) or gloo_built())
        self.assertTrue(hvd.mpi_built() and hvd.mpi_enabled())
        self.assertIsInstance(hvd.mpi_threads_supported(), bool)

    def test_allreduce(self):
        for dtype, dim in itertools.product([torch.int32, torch.int64, torch.float32, torch.float64], [1, 2, 3]):
            torch.manual_seed(1234)
            tensor = torch.randint(-100, 100, [5] * dim).to(dtype)
            self.assertTrue(torch.equal(hvd.allreduce(tensor, average=False), tensor * hvd.size()))
            self.assertTrue(torch.equal(hvd.allreduce(tensor, average=True), tensor))
            self.assertTrue(torch.equal(hvd.allreduce(tensor, op=hvd.Sum), tensor * hvd.size()))
            hvd.allreduce_(tensor, op=hvd.Max)

    def test_allreduce_of_both_kinds_is_refused(self):
        with self.assertRaises(ValueError):
            hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)

    def test_fused(self):
        handles = [allreduce_async_(torch.full([n + 1], float(hvd.rank())), average=False) for n in range(10)]
        for n, handle in enumerate(handles):
            result = synchronize(handle)
            self.assertTrue(torch.equal(result, torch.full([n + 1], float(sum(range(hvd.size()))))))
        handle = hvd.allreduce_async(torch.ones(3))
        while not poll(handle):
            pass
        self.assertTrue(torch.equal(hvd.synchronize(handle), torch.ones(3)))

    def test_grouped(self):
        results = hvd.grouped_allreduce([torch.ones(2), torch.ones(3) * hvd.rank()], op=hvd.Sum)
        self.assertTrue(torch.equal(results[0], torch.full([2], float(hvd.size()))))
        self.assertTrue(torch.equal(results[1], torch.full([3], float(sum(range(hvd.size()))))))

    def test_compression(self):
        tensor = torch.full([4], 1.0 + 2.0**-13)  # not representable as float16
        self.assertTrue(torch.equal(hvd.allreduce(tensor, compression=Compression.none), tensor))
        self.assertTrue(torch.equal(hvd.allreduce(tensor, compression=Compression.fp16), torch.ones(4)))

    def test_gradient_of_allreduce(self):
        tensor = torch.ones(3, requires_grad=True)
        hvd.allreduce(tensor, average=False).backward(torch.ones(3))
        np.testing.assert_allclose(tensor.grad.numpy(), np.full(3, float(hvd.size())))

    def test_allgather_of_unequal_rows(self):
        gathered = hvd.allgather(torch.full([hvd.rank() + 1, 2], hvd.rank()))
        expected = np.concatenate([np.full([r + 1, 2], r) for r in range(hvd.size())])
        np.testing.assert_array_equal(gathered.numpy(), expected)

    def test_broadcast(self):
        root = hvd.size() - 1
        tensor = torch.full([3], float(hvd.rank()))
        self.assertTrue(torch.equal(hvd.broadcast(tensor, root), torch.full([3], float(root))))
        hvd.broadcast_(tensor, root_rank=root)
        self.assertTrue(torch.equal(tensor, torch.full([3], float(root))))
        self.assertEqual(hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=0), {"epoch": 0})
        self.assertEqual(hvd.allgather_object(hvd.rank()), list(range(hvd.size())))

    def test_alltoall(self):
        rows = torch.full([hvd.size()], hvd.rank())
        self.assertTrue(torch.equal(hvd.alltoall(rows), torch.arange(hvd.size())))
        received, splits = hvd.alltoall(rows, splits=torch.ones(hvd.size(), dtype=torch.int32))
        self.assertTrue(torch.equal(received, torch.arange(hvd.size())))
        self.assertTrue(torch.equal(splits, torch.ones(hvd.size(), dtype=torch.int32)))

    def test_reducescatter(self):
        rows = torch.arange(2.0 * hvd.size()).reshape(hvd.size(), 2)
        result = hvd.reducescatter(rows, op=hvd.Sum)
        self.assertTrue(torch.equal(result, rows[hvd.rank() : hvd.rank() + 1] * hvd.size()))

    def test_mismatch_is_an_error_on_every_rank(self):
        if hvd.size() == 1:
            self.skipTest("one rank agrees with itself")
        with self.assertRaises(HorovodInternalError):
            hvd.allreduce(torch.ones(2 + hvd.rank()))
        with self.assertRaises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(2), name=f"of rank {hvd.rank()}")
        self.assertTrue(issubclass(HorovodInternalError, RuntimeError))

    def test_process_sets(self):
        if hvd.size() == 1:
            self.skipTest("needs two ranks")
        first = hvd.add_process_set(ProcessSet([0]))
        others = hvd.add_process_set(list(range(1, hvd.size())))
        own = first if hvd.rank() == 0 else others
        self.assertTrue(own.included())
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own)
        self.assertEqual(total.item(), own.size())
        for process_set in (first, others):
            self.assertTrue(hvd.remove_process_set(process_set))

    def test_broadcast_state(self):
        for make in (lambda p: torch.optim.SGD(p, lr=1e-3 * (hvd.rank() + 1), momentum=0.9), torch.optim.Adam):
            torch.manual_seed(hvd.rank())
            model = torch.nn.Linear(4, 2)
            optimizer = make(model.parameters())
            if hvd.rank() == 0:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            states = hvd.allgather_object({name: value.tolist() for name, value in model.state_dict().items()})
            self.assertTrue(all(state == states[0] for state in states))
            rates = hvd.allgather_object(optimizer.param_groups[0]["lr"])
            self.assertEqual(set(rates), {rates[0]})
            self.assertEqual(len(optimizer.state_dict()["state"]), 2)

    def test_optimizer_is_still_of_its_class(self):
        model = torch.nn.Linear(4, 2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        self.assertIsInstance(optimizer, torch.optim.SGD)
        with self.assertRaises(ValueError):
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                named_parameters=[("same", parameter) for parameter in model.parameters()],
            )

    def test_gradients_are_there_from_the_start_and_zero_grad_keeps_them(self):
        models = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), named_parameters=m.named_parameters())
            for m in models
        ]
        for step in range(4):
            for number, model in enumerate(models):
                for parameter in model.parameters():
                    self.assertIsNotNone(parameter.grad)
                    parameter.requires_grad_(step % 2 == number)
                optimizers[number].zero_grad()
            models[1](models[0](torch.ones(5, 2))).sum().backward()
            for number, model in enumerate(models):
                for parameter in model.parameters():
                    self.assertEqual(bool(parameter.grad.abs().max() > 0), step % 2 == number)
            optimizers[step % 2].step()

    def test_a_step_after_synchronize_warns(self):
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for skip, said in ((False, 1), (True, 0)):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if skip:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
            self.assertEqual(len(caught), said)
            self.assertTrue(all("called without optimizer.skip_synchronize()" in str(each.message) for each in caught))

    def test_names_in_flight(self):
        for function in (hvd.allreduce_async, hvd.allgather_async):
            function(torch.ones(17, 17), name="the same name")  # nobody waits: the name is free when it is done
            with self.assertRaises(ValueError):
                for _ in range(10):
                    function(torch.ones(17, 17), name="the same name")
            hvd.barrier()
        self.assertEqual(hvd.synchronize(hvd.broadcast_async(torch.ones(2), 0, name="the same name")).tolist(), [1, 1])

    def test_poll_is_false_at_first(self):
        self.assertFalse(hvd.poll(hvd.allreduce_async(torch.ones(3))))

    def test_join(self):
        if hvd.rank() > 0:
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="while rank 0 has joined")
            self.assertEqual(total.item(), hvd.size() - 1)
        self.assertIn(hvd.join(), range(hvd.size()))

    def test_env(self):
        with env(HOROVOD_SOMETHING="1"):
            self.assertEqual(os.environ["HOROVOD_SOMETHING"], "1")
        self.assertNotIn("HOROVOD_SOMETHING", os.environ)


if __name__ == "__main__":
    unittest.main()
