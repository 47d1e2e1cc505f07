"""The sequential draft head: a block of drafts whose logits depend on the draft before through a low-rank bias."""

from dspark_kernels.draft_head.api import draft, lowering

__all__ = ["draft", "lowering"]
