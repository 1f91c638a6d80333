"""All public names of sar, which imports them when they are used: in the server from which workers are forked."""

import sar

LOADED = [getattr(sar, name) for name in sar.__all__ if name != "RelGraphConv"]
