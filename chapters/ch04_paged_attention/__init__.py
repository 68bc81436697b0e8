"""Chapter 4: PagedAttention in Triton, and the plain torch it must equal."""
