"""Chapter 6, prefix cache: block keys, longest prefix, sharing, eviction."""
