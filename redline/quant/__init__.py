"""Converts checkpoints between weight formats: reads, quantizes with low error, writes shard by shard, and audits.

The formats are defined in `ops.formats`, their spelling in files in `model.k2`; this package chooses scales and codes,
and streams through checkpoints that fill a disk. In the import order it is above the worker, at the level of api and
draft.
"""
