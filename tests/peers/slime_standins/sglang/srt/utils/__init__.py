def kill_process_tree(*args, **kwargs):
    raise RuntimeError("sglang is a stand-in")


class MultiprocessingSerializer:
    """Never made on a CPU."""
