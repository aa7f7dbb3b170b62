"""The configurations of Alpa's model suites, as published (Zheng et al., OSDI 2022, and the code beside it).

A mixture's ``mlp_factor`` is the feed-forward size over the hidden size; a Wide-ResNet's ``width`` is the output of a
block's 3×3 convolution over its input.
"""

from __future__ import annotations

from typing import Any

ALPA_SUITE: dict[str, dict[str, Any]] = {
    "gpt": {
        "seq_len": 1024, "vocab": 51200, "dtype": "float16", "optimizer": "adamw", "global_batch": 1024, "remat": True,
        "models": [
            {"name": "350M", "gpus": 1, "hidden": 1024, "layers": 24, "heads": 16, "microbatches": 512},
            {"name": "760M", "gpus": 2, "hidden": 1536, "layers": 24, "heads": 16, "microbatches": 128},
            {"name": "1.3B", "gpus": 4, "hidden": 2048, "layers": 24, "heads": 32, "microbatches": 128},
            {"name": "2.6B", "gpus": 8, "hidden": 2560, "layers": 32, "heads": 32, "microbatches": 128},
            {"name": "6.7B", "gpus": 16, "hidden": 4096, "layers": 32, "heads": 32, "microbatches": 64},
            {"name": "15B", "gpus": 32, "hidden": 5120, "layers": 48, "heads": 40, "microbatches": 128},
            {"name": "39B", "gpus": 64, "hidden": 8192, "layers": 48, "heads": 64, "microbatches": 1024},
        ],
    },
    "moe": {
        "seq_len": 1024, "vocab": 32000, "heads": 16, "expert_group_size": 2048, "mlp_factor": 8, "dtype": "float16",
        "optimizer": "adafactor", "global_batch": 1024,
        "models": [
            {"name": "380M", "gpus": 1, "hidden": 768, "layers": 8, "experts": 8, "microbatches": 512},
            {"name": "690M", "gpus": 2, "hidden": 768, "layers": 8, "experts": 16, "microbatches": 32},
            {"name": "1.3B", "gpus": 4, "hidden": 768, "layers": 16, "experts": 16, "microbatches": 32},
            {"name": "2.4B", "gpus": 8, "hidden": 1024, "layers": 16, "experts": 16, "microbatches": 32},
            {"name": "10B", "gpus": 16, "hidden": 1536, "layers": 16, "experts": 32, "microbatches": 16},
            {"name": "27B", "gpus": 32, "hidden": 2048, "layers": 16, "experts": 48, "microbatches": 128},
            {"name": "70B", "gpus": 64, "hidden": 2048, "layers": 32, "experts": 64, "microbatches": 64},
        ],
    },
    "wide_resnet": {
        "image": 224, "dtype": "float32", "optimizer": "sgd_momentum_0.9",
        "models": [
            {"name": "250M", "gpus": 1, "layers": 50, "channels": 160, "width": 2, "batch": 1536, "microbatches": 24},
            {"name": "500M", "gpus": 2, "layers": 50, "channels": 224, "width": 2, "batch": 1536, "microbatches": 24},
            {"name": "1B", "gpus": 4, "layers": 50, "channels": 320, "width": 2, "batch": 1536, "microbatches": 24},
            {"name": "2B", "gpus": 8, "layers": 50, "channels": 448, "width": 2, "batch": 1536, "microbatches": 24},
            {"name": "4B", "gpus": 16, "layers": 50, "channels": 640, "width": 2, "batch": 1536, "microbatches": 32},
            {"name": "6.8B", "gpus": 32, "layers": 50, "channels": 320, "width": 16, "batch": 1536, "microbatches": 32},
            {"name": "13B", "gpus": 64, "layers": 101, "channels": 320, "width": 16, "batch": 1520, "microbatches": 38},
        ],
    },
    "u_transformer": {
        "image": 32, "blocks": 4, "channel_multipliers": [1, 2, 4, 4], "layers_per_block": 1, "dtype": "float32",
        "optimizer": "sgd", "remat": True,
        "models": [
            {"name": "470M", "gpus": 2, "channels": 320, "batch": 256, "microbatches": 4},
            {"name": "1B", "gpus": 4, "channels": 480, "batch": 2048, "microbatches": 32},
            {"name": "2B", "gpus": 8, "channels": 672, "batch": 2048, "microbatches": 32},
        ],
    },
    "cluster": {
        "name": "p3.16xlarge", "devices_per_host": 8, "device": "V100-16GB", "intra_host": "NVLink",
        "inter_host_gbit_per_s": 25,
    },
}  # fmt: skip
