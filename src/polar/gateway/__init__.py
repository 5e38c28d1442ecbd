"""The node: it runs sessions and the model proxy, and asks the rollout server for work."""

from polar.gateway.node import Gateway

__all__ = ["Gateway"]
