class FlattenedTensorBucket:
    """Never made on a CPU."""
