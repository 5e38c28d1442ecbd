"""The flags of Megatron that Slime reads, with Megatron's defaults or small ones."""

import argparse

_SWITCHES = ("--fp16", "--bf16", "--multi-latent-attention")
_NUMBERS = {
    "--seq-length": None,
    "--vocab-size": None,
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--num-layers": 2,
    "--hidden-size": 32,
    "--moe-router-topk": 1,
    "--decoder-first-pipeline-num-layers": None,
    "--decoder-last-pipeline-num-layers": None,
    "--max-position-embeddings": None,
    "--ckpt-step": None,
}
_TEXTS = {"--tokenizer-model": None, "--tokenizer-type": None, "--memory-snapshot-path": "snapshot.pickle"}


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in _SWITCHES:
        parser.add_argument(name, action="store_true")
    for name, default in _NUMBERS.items():
        parser.add_argument(name, type=int, default=default)
    for name, default in _TEXTS.items():
        parser.add_argument(name, default=default)
    parser.add_argument("--rotary-base", type=float, default=10000.0)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


def validate_args(args, *rest, **named):
    return args


def core_transformer_config_from_args(*args, **kwargs):
    raise RuntimeError("megatron.training is a stand-in")
