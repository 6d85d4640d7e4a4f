"""The decode loop: token ids in, rounds of token ids out. Floor 3: never text, retrieval or tokenizers."""
