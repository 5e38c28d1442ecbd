"""Starts the real SGLang on a CPU; grammars too, whose masks it puts on logits of a GPU alone.

Run as a file with the engine's own Python and this folder on PYTHONPATH. SGLang's worker processes run it again, so
what stands outside of `__main__` reaches them as well.
"""

import sys

import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

XGrammarGrammar.apply_vocab_mask = lambda self, logits, vocab_mask: xgrammar.apply_token_bitmask_inplace(
    logits, vocab_mask
)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
