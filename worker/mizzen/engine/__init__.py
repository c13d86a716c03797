"""The step runner, device state, sampler and the overlap loop."""
