"""``horovod.common``: what is no framework's."""
