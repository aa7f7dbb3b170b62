"""Worker processes on one machine that reshard together over pipes: what measures resharding plans, before steps run
them."""
