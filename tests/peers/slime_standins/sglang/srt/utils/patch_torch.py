def monkey_patch_torch_reductions():
    """There is no torch reduction to patch."""
