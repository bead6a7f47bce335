"""Tables of known sources, one JSON file per fix, made by `kvmend fingerprint` from released files."""
