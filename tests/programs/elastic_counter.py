"""An elastic training with NumPy alone, which counts its steps, and prints the count and the weights at its end.

COUNTER_STEPS     how many steps
COUNTER_FAULTS    faults, separated by commas: ``number.kind.rank.step.place.delay``. Each happens once in the job
COUNTER_FOLDER    a folder in which each fault, and each start of rank 0, leaves a file
COUNTER_UNTIL     a file; the training comes to its end when it is there, instead of after so many steps
COUNTER_EVERY     commit after so many steps; after the others, only look whether hosts have changed
COUNTER_TELL      print each step; if "starts too", when the training begins or goes on, too
COUNTER_SETS      if "1", the program makes a process set
COUNTER_MEMORY    a control group in which the fault "memory" runs out of memory; empty if there is none
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite import elastic

STEPS = int(os.environ.get("COUNTER_STEPS", "100"))
EVERY = int(os.environ.get("COUNTER_EVERY", "1"))
FOLDER = Path(os.environ["COUNTER_FOLDER"])
FAULTS = [each.split(".") for each in os.environ.get("COUNTER_FAULTS", "").split(",") if each]
WIDTH = 1000


def fail(kind: str) -> None:
    match kind:
        case "memory" if group := os.environ.get("COUNTER_MEMORY"):
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
            taken = []
            while True:  # until the kernel kills this process
                taken.append(b"x" * 2**20)
        case "kill" | "memory":  # without a control group: the kernel would kill it by the same signal
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(0.01)
        case "exception":
            raise ValueError("a fault")
        case "exit3":
            sys.exit(3)
        case "exit0":
            sys.exit(0)
        case "os_exit":
            os._exit(0)
        case "slow":
            time.sleep(3.0)
        case "launcher":
            os.kill(launcher(), signal.SIGKILL)
            time.sleep(60.0)  # the guard ends this process
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)


def launcher() -> int:
    """The process id of hvdliterun."""
    pid = os.getpid()
    while b"hvdlite.launch" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def perhaps(place: str, step: int, rank: int | None = None) -> None:
    """Cause the fault that is due here, unless it has happened already."""
    mine = hvd.rank() if rank is None else rank
    for number, kind, whose, at, where, delay in FAULTS:
        if (int(whose), int(at), where) != (mine, step, place):
            continue
        try:
            (FOLDER / f"fault.{number}.{kind}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if kind in ("kill", "memory", "stop", "os_exit", "segfault") and int(delay):
            timer = threading.Timer(int(delay) / 1e4, fail, [kind])  # it strikes wherever the program then is
            timer.daemon = True
            timer.start()
        else:
            fail(kind)


def is_over(step: int) -> bool:
    if "COUNTER_UNTIL" not in os.environ:
        return step == STEPS
    return hvd.broadcast_object(Path(os.environ["COUNTER_UNTIL"]).exists())


class Noisy(elastic.ObjectState):
    """A state in whose commit a fault may strike."""

    def saved(self) -> dict[str, object]:
        perhaps("commit", self.step)
        return super().saved()


@elastic.run
def train(state: Noisy) -> None:
    if os.environ.get("COUNTER_TELL") == "starts too" and hvd.rank() == 0:
        print(f"begins at {time.time():.4f}", flush=True)
    perhaps("start", state.step)
    while not is_over(state.step):
        perhaps("step", state.step)
        rng = np.random.default_rng(state.step)
        samples = rng.standard_normal((12, WIDTH))  # the ranks share the samples of a step
        mine = samples[hvd.rank() :: hvd.size()]
        gradient = hvd.allreduce((state.weights - mine).sum(0), hvd.Sum) / len(samples)
        perhaps("exchanged", state.step)
        state.weights = state.weights - 0.1 * gradient
        state.step += 1
        state.counted[state.step - 1] += 1
        state.sizes = state.sizes if state.sizes[-1:] == [hvd.size()] else [*state.sizes, hvd.size()]
        if "COUNTER_TELL" in os.environ and hvd.rank() == 0:
            print(f"step {state.step} of {hvd.size()} ranks at {time.time():.4f}", flush=True)
        if state.step % EVERY == 0:
            state.commit()
        else:
            state.check_host_updates()


perhaps("begin", 0, int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
hvd.init(process_sets=[[0]] if os.environ.get("COUNTER_SETS") == "1" else [])
if hvd.rank() == 0:
    with (FOLDER / "starts").open("a") as file:
        file.write(f"{hvd.size()}\n")
state = Noisy(weights=np.zeros(WIDTH), step=0, counted=np.zeros(100000, int), sizes=[], resets=[])
state.register_reset_callbacks([lambda: state.resets.append((state.step, hvd.size()))])
train(state)
atexit.register(perhaps, "exit", state.step)
perhaps("end", state.step)
if hvd.rank() == 0:
    print(
        f"{state.step} steps, counted {set(state.counted[: state.step])} times and {state.counted.sum()} in all, sizes "
        f"{state.sizes}, resets {state.resets}, weights {hashlib.sha256(state.weights.tobytes()).hexdigest()[:16]}"
    )
