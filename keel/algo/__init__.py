"""The mathematics of Keel, as pure functions: tensors in, tensors out; no configuration, I/O or global state."""
