"""Says what is installed on a machine with a GPU, and whether its loopback interface is up."""

import fcntl
import importlib.metadata
import os
import platform
import socket
import struct

import torch

NAMES = [
    "torch",
    "triton",
    "torchvision",
    "jax",
    "cupy-cuda13x",
    "nvidia-nccl-cu13",
    "mpi4py",
    "pytest",
    "pytest-timeout",
]
SIOCGIFFLAGS = 0x8913  # the request that reads an interface's flags
UP, RUNNING = 0x1, 0x40

found = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
print("python", platform.python_version(), *(f"{name} {found.get(name, 'MISSING')}" for name in NAMES), sep=", ")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    flags = struct.unpack_from("16xh", fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16s16x", b"lo")))[0]
print(f"interfaces {os.listdir('/sys/class/net')}, loopback up {bool(flags & UP)} running {bool(flags & RUNNING)}")
print("cores", len(os.sched_getaffinity(0)), "CUDA", torch.version.cuda, "sees a GPU:", torch.cuda.is_available())
if torch.cuda.is_available():
    print("NCCL of torch", torch.cuda.nccl.version(), "capability", torch.cuda.get_device_capability())
