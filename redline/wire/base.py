"""The two kinds of fact: a Record travels inside another; a Message travels on its own and carries its name."""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fact that may cross a process border. Fields that say nothing new stay behind."""


class Message(Record, frozen=True, kw_only=True, tag=True):
    """A record sent on its own, so it carries its own name."""
