def maybe_finalize_async_save(*args, **kwargs):
    """Nothing was begun."""
