"""The fixes that ship with kvmend: one module each, beside them the tables of known sources and the proofs."""
