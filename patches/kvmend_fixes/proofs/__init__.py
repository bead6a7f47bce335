"""Proofs: one module per fix, `measure()` run on the installed framework with the fix off and on."""
