"""The two kinds of fact: a Record travels inside another; a Message travels on its own and carries its name."""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fact that may cross a process border."""


class Message(Record, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A record sent on its own, so it carries its own name. Fields at their defaults stay behind."""
