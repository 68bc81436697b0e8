"""What is promised, as sentences. A package, so that no other of this name is taken for it."""
