class ServerArgs:
    """The flags of SGLang's server that Slime reads."""

    def __init__(self, **settings):
        self.__dict__.update(settings)

    @staticmethod
    def add_cli_args(parser):
        for names in (
            ("--data-parallel-size", "--dp-size"),
            ("--pipeline-parallel-size", "--pp-size"),
            ("--expert-parallel-size", "--ep-size"),
            ("--tensor-parallel-size",),
        ):
            parser.add_argument(*names, type=int, default=1)
        for name in ("--enable-dp-attention", "--enable-deterministic-inference", "--enable-metrics"):
            parser.add_argument(name, action="store_true")
        for name in ("--speculative-algorithm", "--tool-call-parser", "--reasoning-parser"):
            parser.add_argument(name, default=None)
        parser.add_argument("--host", default="127.0.0.1")
