# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm memory-plan MODEL [any serve option] [--gpu NAME] [--memory GIB]``.

Says before anything is downloaded or loaded whether a configuration fits a
card, what is short, and which settings mend it.

The card has to be known before anything reads the platform, so the command
runs before the other ones' modules are imported (``maybe_run``); it is also
faster so.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.entrypoints.cli.types import CLISubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.memory_plan.planner import Device

NAME = "memory-plan"
HELP = "Plan a model's memory on a GPU, without the GPU."
DESCRIPTION = (
    "Print what a configuration needs of a GPU's memory: weights, states, KV cache, "
    "activation peak and CUDA graphs; whether that fits; and which settings would "
    "make it fit. Takes every option of 'vllm serve'. Needs no GPU, and reads the "
    "model's configuration only. Exits with 1 when it does not fit."
)


def maybe_run(argv: list[str] | None = None) -> bool:
    """Run the command if ``argv`` (``sys.argv``) asks for it.

    Exits with 1 when the plan does not fit, and with 2 when the configuration is
    refused: with the message that ``vllm serve`` refuses it with.

    Returns:
        Whether it ran.

    """
    argv = sys.argv if argv is None else argv
    if argv[1:2] != [NAME]:
        return False
    # One pass of imports, then the process ends: nothing to collect.
    gc.disable()
    try:
        fits = run(argv[1:])
    except Exception as error:
        # The message that serving ends with, without the way to it.
        if os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG":
            raise
        print(f"vllm {NAME}: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    if not fits:
        sys.exit(1)
    return True


def run(argv: list[str]) -> bool:
    """Plan what ``argv`` (from the command's name on) describes, and print it.

    Returns:
        Whether it fits.

    """
    _log_to_stderr()
    card, _ = _card_parser().parse_known_args(argv[1:])
    asks_for_help = {"-h", "--help"} & {arg.split("=")[0] for arg in argv}
    device = None if asks_for_help else _assume_device(card.gpu, card.memory)

    from vllm.utils.argparse_utils import FlexibleArgumentParser

    root = FlexibleArgumentParser(prog="vllm")
    subparsers = root.add_subparsers(required=True, dest="subparser")
    add_parser(subparsers)
    args = root.parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    _inspect_models_here()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )

    from vllm.v1.core.memory_plan.planner import Planner
    from vllm.v1.core.memory_plan.table import format_plan

    planner = Planner.of(config, device or _this_device(card.memory))
    plan = planner.with_remedies(all_requests=True)
    print(plan.to_json() if args.json else format_plan(plan))
    return plan.fits


def add_parser(subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
    """Add the command's parser: the options of ``serve``, and the card's."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    parser = subparsers.add_parser(
        NAME,
        help=HELP,
        description=DESCRIPTION,
        usage="vllm memory-plan [model_tag] [--gpu NAME] [--memory GIB] [--json] "
        "[options of vllm serve]",
    )
    parser = make_arg_parser(parser)
    _add_card_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="Print the plan as JSON, in bytes."
    )
    return parser


def _add_card_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm.platforms.planned_gpu import GPUS

    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"The card to plan for, one of: {', '.join(GPUS)}. "
        "Without it, this machine's device.",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="The card's memory in GiB, in place of the named card's or this "
        "machine's. On a machine without a GPU and with no --gpu, of a CUDA card of "
        "compute capability 8.0.",
    )


def _card_parser() -> argparse.ArgumentParser:
    """Reads the card alone, before the options of ``serve`` can be imported."""
    parser = argparse.ArgumentParser(
        prog=f"vllm {NAME}", add_help=False, allow_abbrev=False
    )
    _add_card_arguments(parser)
    return parser


def _assume_device(name: str | None, memory_gib: float | None) -> Device | None:
    """Make a card that is not there the platform; None for this machine's."""
    from vllm.platforms import planned_gpu

    if name is None and (memory_gib is None or _has_gpu()):
        return None
    try:
        gpu = planned_gpu.find_gpu(name, memory_gib)
    except ValueError as error:
        _card_parser().error(str(error))
    planned_gpu.assume_gpu(gpu)

    from vllm.v1.core.memory_plan.planner import Device

    return Device(gpu.name, gpu.total_bytes)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _this_device(memory_gib: float | None) -> Device:
    from vllm.platforms import current_platform
    from vllm.v1.core.memory_plan.planner import Device, cpu_device

    if current_platform.is_cpu():
        return cpu_device()
    total = current_platform.get_device_total_memory()
    if memory_gib is not None:
        total = int(memory_gib * 2**30)
    return Device(current_platform.get_device_name(), total)


def _inspect_models_here() -> None:
    """Import the model's class in this process, which is going to need it.

    A server leaves that to a process of its own, to keep CUDA from being
    initialised; that one would find another platform, and takes as long again.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.planned_gpu import layers_assumed

    # Its import looks up compiled operators too.
    registry._run_in_subprocess = layers_assumed()(lambda fn: fn())


def _log_to_stderr() -> None:
    """Keep stdout for the plan, and only what the user must know on stderr."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    from vllm.logger import _configure_vllm_root_logger

    _configure_vllm_root_logger()


def cmd_init() -> list[CLISubcommand]:
    """For ``vllm --help``; ``maybe_run`` runs the command."""
    from vllm.entrypoints.cli.types import CLISubcommand

    class MemoryPlanSubcommand(CLISubcommand):
        """The ``memory-plan`` subcommand."""

        name = NAME

        def subparser_init(
            self, subparsers: argparse._SubParsersAction
        ) -> FlexibleArgumentParser:
            return subparsers.add_parser(NAME, help=HELP, description=DESCRIPTION)

    return [MemoryPlanSubcommand()]
