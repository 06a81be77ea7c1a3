"""From one format of weights to another: a checkpoint read, rounded with little error, written shard by shard, audited.

What the formats are is in `ops.formats`, how files spell them in `model.k2`; here is what is chosen when weights are
rounded, and how a checkpoint that fills a disk is worked through. Above the worker, beside api and draft.
"""
