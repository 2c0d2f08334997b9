"""Who gets what: cost model, batch policies, assignment to ranks, sampler and simulator. Imports no PyTorch."""
