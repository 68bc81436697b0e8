"""Chapter 3, block manager: free list, block tables, slots, ref counts."""
