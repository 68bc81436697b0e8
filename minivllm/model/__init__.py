"""The wing that computes: layers, attention over the paged cache, sampling."""
