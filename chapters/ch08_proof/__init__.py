"""Chapter 8: the invariants as property tests, judged by the wrong answers they catch."""
