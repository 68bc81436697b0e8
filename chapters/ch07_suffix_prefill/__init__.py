"""Chapter 7: computing only what the cache does not hold."""
