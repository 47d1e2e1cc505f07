"""Reads a quantised checkpoint folder by transformers, as it is, and writes what transformers then holds.

Usage: read_quantised.py FOLDER FILE.npz [LENGTH]
Keys: P/<checkpoint key> (fp32, of the weights dequantised by transformers), ids [2, LENGTH], logits [2, LENGTH, V].
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV4ForCausalLM
from transformers.utils.logging import disable_progress_bar

from transformers_v4 import to_checkpoint_keys


@torch.no_grad()
def main(folder: str, path: Path, length: int) -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    # Without a GPU transformers dequantises a checkpoint of this kind while it reads it.
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(report.values()):
        raise SystemExit(f"transformers does not take all of {folder}: {report}")
    ids = torch.randint(0, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    logits = model.eval()(input_ids=ids, use_cache=False).logits
    held = to_checkpoint_keys(model.state_dict())
    np.savez_compressed(path, ids=ids.numpy(), logits=logits.numpy(), **{"P/" + k: v.numpy() for k, v in held.items()})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 24)
