"""Chapter 2: who runs in a step, how many tokens, and who gives way."""
