"""From text to tokens to training samples: corpora, tokenizers, Megatron's indexed files, and the order of samples."""
