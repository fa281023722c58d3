"""Text to tokens to training samples: corpora, tokenizers, Megatron's indexed files, a stateless sample order."""
