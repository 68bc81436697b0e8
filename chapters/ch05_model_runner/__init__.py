"""Chapter 5: batch assembly, the rows that give logits, the sampler, the model runner."""
