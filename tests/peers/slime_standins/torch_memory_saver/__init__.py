import contextlib


class _NothingToSave:
    _impl = None
    memory_margin_bytes = 0

    @contextlib.contextmanager
    def disable(self):
        yield

    @contextlib.contextmanager
    def region(self, *args, **kwargs):
        yield

    def pause(self, *args):
        pass

    def resume(self, *args):
        pass


torch_memory_saver = _NothingToSave()
