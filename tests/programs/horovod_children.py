"""Child processes of all start methods, and a subprocess, import Horovod."""

import multiprocessing
import subprocess
import sys

import horovod.common.util


def work(text: str) -> str:
    import horovod.common.exceptions as again

    return f"{text} {again.__name__} {horovod.common.util.num_rank_is_power_2(8)}"


if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.map(work, [method]))
    code = "import horovod; print('subprocess', horovod.__version__)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout, end="")
