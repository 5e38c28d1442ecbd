"""The session log is the truth about an attempt; trajectories, metrics, exports and viewers are functions of it."""

from polar.sessionlog.bodies import Bodies, Body, StoredBody
from polar.sessionlog.packing import pack, unpack
from polar.sessionlog.reader import Call, SessionLog, parse, read
from polar.sessionlog.records import (
    Chunk,
    Delivered,
    Finished,
    Header,
    Joined,
    Opened,
    Prompt,
    Record,
    Refused,
    Sealed,
)
from polar.sessionlog.writer import LogWriter

__all__ = [
    "Bodies",
    "Body",
    "Call",
    "Chunk",
    "Delivered",
    "Finished",
    "Header",
    "Joined",
    "LogWriter",
    "Opened",
    "Prompt",
    "Record",
    "Refused",
    "Sealed",
    "SessionLog",
    "StoredBody",
    "pack",
    "parse",
    "read",
    "unpack",
]
