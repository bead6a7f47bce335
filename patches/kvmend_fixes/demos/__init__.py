"""Fixes at work on the real framework: one module per fix, `run(options) -> int`, started by `kvmend demo`."""
