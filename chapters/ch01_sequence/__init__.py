"""Chapter 1: one request, its tokens, its state, and when it stops."""
