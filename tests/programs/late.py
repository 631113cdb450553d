"""A rank finishes its program without an error, and crashes while it exits."""

import atexit
import os
import signal

atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
