"""A rank that finishes its program well, and crashes while it exits."""

import atexit
import os
import signal

atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
