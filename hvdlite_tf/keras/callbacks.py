"""The callbacks of `hvdlite_tf.callbacks`, under the module name that Horovod uses."""

from hvdlite_tf import callbacks
from hvdlite_tf.callbacks import *  # noqa: F403

__all__ = callbacks.__all__
