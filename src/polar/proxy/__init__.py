"""The model proxy: the one place that sees every token between a harness and its engine, and records each exactly."""

from polar.proxy.engines import make_engine
from polar.proxy.model import ModelProxy
from polar.proxy.rendering import load_rendering
from polar.proxy.session import Attempt, RunRecord

__all__ = ["Attempt", "ModelProxy", "RunRecord", "load_rendering", "make_engine"]
