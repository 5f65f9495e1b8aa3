# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantise a trained FP16 checkpoint: NVFP4 in ModelOpt's layout, or FP8 block-128.

``python -m benchmarks.needle.quantize FP16_FOLDER OUT --quant nvfp4``

Rounds each weight to the nearest value, with no calibration and no training.
The arithmetic is ``tools/demo/quantize.py``'s.
"""

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.needle import model
from tools.demo import quantize

METHODS = {"nvfp4": quantize.nvfp4, "fp8": quantize.fp8}
STORED = {
    "nvfp4": "NVFP4 (ModelOpt's layout) in the linear layers, the rest FP16",
    "fp8": "FP8 E4M3 with block-128 scales in the linear layers, the rest FP16",
}


def write(folder: Path, out: Path, quant: str) -> Path:
    """Write ``folder``'s checkpoint to ``out`` with its linear layers quantised."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config, tensors = METHODS[quant](config, load_file(folder / "model.safetensors"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    card = card.replace("- Weights: FP16\n", f"- Weights: {STORED[quant]}\n")
    card += f"- Then: `python -m benchmarks.needle.quantize … --quant {quant}`\n"
    return model.write(out, config, tensors, card)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.needle.quantize",
        description="Quantise a trained FP16 checkpoint.",
    )
    parser.add_argument("folder", type=Path, metavar="FP16_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--quant", choices=METHODS, default="nvfp4")
    args = parser.parse_args(argv)
    write(args.folder, args.out, args.quant)
    size = (args.out / "model.safetensors").stat().st_size / 2**20
    print(f"{args.out}: {size:.1f} MiB of weights, {args.quant}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
