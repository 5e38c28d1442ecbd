"""What runs beside the sandboxed programs, in a process of its own: standard library only, one thread, few imports.

One process (`launcher`) waits with everything imported; for each sandbox it forks a copy that enters the sandbox's
namespaces and serves it (`server`), so no program of ours has to exist in an image and none has to start.
"""
