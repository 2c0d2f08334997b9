"""The Wan 2.1 text-to-video model and how it is trained.

`config`, `model` (from `block` and `rope`), `initialize` and `convert` make the network; `objective` is flow matching
with draws seeded per sample; `synthetic`, `shards` and `make_corpus` are where samples come from.

`run` puts a `trainer` together: `batching` and `calibrate` choose the policy, `epochs` deals its steps, `engine` takes
them on a model that `parallel` has sharded, `checkpointing` and `log` keep what comes of it.
"""
