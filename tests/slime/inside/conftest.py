"""The rollout server and the scripted gateway of the bridge's own tests."""

from tests.bridge.conftest import gateway, house, make_trainer, server

__all__ = ["gateway", "house", "make_trainer", "server"]
