"""Retrieval: documents in, the passages a drafter should read out. Floor 1; imports no torch at load.

chunk.py   a document -> passages of at most so many tokens, each with its offsets
embed.py   passages -> vectors; several windows a passage where the embedder reads less than a passage
rank.py    vectors or words -> one score a passage (dense, bm25, hybrid)
select.py  scores -> the passages to read, within a budget, in document order
cache.py   arrays on disk that may vanish at any time
index.py   all of it together, once for many questions

It knows no tokenizer and no target: a function that counts tokens is given to it.
"""

from rapid.retrieval.chunk import chunk_document
from rapid.retrieval.embed import Embedder, load_embedder
from rapid.retrieval.index import Index, Retrieved
from rapid.retrieval.select import context_budget, join_chunks

__all__ = [
    "Embedder",
    "Index",
    "Retrieved",
    "chunk_document",
    "context_budget",
    "join_chunks",
    "load_embedder",
]
