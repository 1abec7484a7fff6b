"""Where ranks meet, and what one of them is told."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig

# Exit status of a rank whose settings or model cannot be used, which starting it again would not change.
UNUSABLE = 3


class Rendezvous(msgspec.Struct, frozen=True):
    """address, port: of the store where ranks find each other. own: the address by which ranks of other hosts reach
    those of this one. local: ranks of this host."""

    address: str
    port: int
    own: str
    local: int


class Assignment(msgspec.Struct, frozen=True):
    """What a process that follows is told on its standard input. ring and bell are the descriptors of its ring, of
    which it is reader number `reader` among `readers`."""

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous
    ring: int
    bell: int
    reader: int
    readers: int
