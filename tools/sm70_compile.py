# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile every CUDA kernel of csrc/sm70 for sm_70, without a GPU or a toolkit.

CUDA 13 no longer compiles for sm_70, and a machine for tests has no CUDA 12. But
NVRTC 12.6, its ptxas and its headers are ordinary PyPI packages, and need no
driver. This program puts them into a folder of their own (never into the
environment, where torch has its CUDA packages of another version), compiles each
kernel that a header (*.cuh) lists with SM70_ENTRY, and prints for each: registers,
local memory, shared memory and the number of tensor-core instructions.

It fails when a kernel
- spills registers or keeps anything else in local memory,
- needs more than 96 KiB of shared memory, static and dynamic, or more registers
  than a block of its size can have,
- is meant for tensor cores and has no such instruction, or the other way round,
- is not listed, or stands outside a kernel header, so that none escapes.

    python tools/sm70_compile.py
"""

import argparse
import ctypes
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = REPOSITORY / "csrc" / "sm70"
CACHE = REPOSITORY / "build" / "cuda126"
PACKAGES = tuple(
    f"nvidia-cuda-{part}-cu12==12.6.*" for part in ("nvrtc", "nvcc", "runtime")
)

MAX_SHARED_BYTES = 96 * 1024
REGISTERS_PER_SM = 64 * 1024
WARPS_PER_SM = 64
BLOCKS_PER_SM = 32
# The low 12 bits of an instruction are its opcode; this one is HMMA on sm_70.
HMMA_OPCODE = 0x236
INSTRUCTION_BYTES = 16


class CompileError(Exception):
    """A header that does not compile, or tools that could not be had."""


@dataclass(frozen=True)
class Toolchain:
    """NVRTC 12.6 and the ptxas and the headers that go with it."""

    root: Path

    @property
    def nvrtc(self) -> Path:
        return self.root / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"

    @property
    def ptxas(self) -> Path:
        return self.root / "nvidia/cuda_nvcc/bin/ptxas"

    @property
    def includes(self) -> tuple[Path, ...]:
        # The first has cuda_fp16.h and mma.h, the second the crt/ folder that
        # those include.
        return (
            self.root / "nvidia/cuda_runtime/include",
            self.root / "nvidia/cuda_nvcc/include",
        )

    def is_complete(self) -> bool:
        return all(path.exists() for path in (self.nvrtc, self.ptxas, *self.includes))


def fetch_packages(
    packages: Sequence[str], cache: Path, is_complete: Callable[[Path], bool]
) -> None:
    """Put `packages` into `cache` with pip, if it is not complete.

    Raises:
        CompileError: pip could not fetch the packages.

    """
    if is_complete(cache):
        return
    print(f"fetching {', '.join(packages)} into {cache}", file=sys.stderr)
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Beside the cache and then renamed: an interrupted run leaves no half of one.
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        target = Path(scratch) / "cuda"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(target)]
        done = subprocess.run([*command, *packages], capture_output=True, text=True)
        if done.returncode != 0 or not is_complete(target):
            raise CompileError(
                f"pip could not install {' '.join(packages)} (exit status "
                f"{done.returncode}); a package index is needed once:\n"
                f"{done.stderr.strip()}"
            )
        shutil.rmtree(cache, ignore_errors=True)
        target.rename(cache)


def fetch_toolchain(cache: Path = CACHE) -> Toolchain:
    """Return the toolchain in `cache`, fetched with pip if it is not there (60 MB).

    Raises:
        CompileError: pip could not fetch the packages.

    """
    fetch_packages(PACKAGES, cache, lambda root: Toolchain(root).is_complete())
    return Toolchain(cache)


class Nvrtc:
    """The few functions of libnvrtc that are needed, through ctypes."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._lib = ctypes.CDLL(str(toolchain.nvrtc))
        self._includes = toolchain.includes

    def compile(
        self, source: str, include: Path, kernels: Sequence[str] = ()
    ) -> tuple[str, dict[str, str]]:
        """Compile `source` for compute_70, and instantiate the named kernels.

        Args:
            source: CUDA C++.
            include: a folder searched for includes, before CUDA's.
            kernels: C++ names such as `a::kernel<b>`.

        Returns:
            PTX, and the linker name of each of `kernels`.

        Raises:
            CompileError: with the compiler's messages.

        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            b"sm70.cu",
            0,
            None,
            None,
        )
        try:
            for kernel in kernels:
                self._call("nvrtcAddNameExpression", program, kernel.encode())
            options = ["--gpu-architecture=compute_70", "--std=c++17"]
            options += [f"--include-path={path}" for path in (include, *self._includes)]
            encoded = (ctypes.c_char_p * len(options))(
                *(option.encode() for option in options)
            )
            status = self._lib.nvrtcCompileProgram(program, len(options), encoded)
            if status != 0:
                raise CompileError(self._text(program, "ProgramLog"))
            names = {}
            for kernel in kernels:
                name = ctypes.c_char_p()
                self._call(
                    "nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(name)
                )
                names[kernel] = (name.value or b"").decode()
            return self._text(program, "PTX"), names
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()  # without the NUL, which ptxas would reject

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status != 0:
            raise CompileError(f"{function} failed with NVRTC error {status}")


@dataclass(frozen=True)
class Entry:
    """A kernel as its header lists it (see csrc/sm70/kernel_entry.h)."""

    kernel: str
    threads: int
    dynamic_shared_bytes: int
    tensor_cores: bool


@dataclass(frozen=True)
class KernelReport:
    """What a kernel of a header became on sm_70."""

    header: str
    entry: Entry
    registers: int  # a thread
    stack_bytes: int  # local memory of a thread, spills not counted
    spill_bytes: int  # stored and loaded, a thread
    static_shared_bytes: int  # a block
    hmma: int  # tensor-core instructions

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.entry.dynamic_shared_bytes

    @property
    def blocks_per_sm(self) -> int:
        """How many blocks fit on a V100's multiprocessor at once."""
        warps = -(-self.entry.threads // 32)
        # Registers are handed out to a warp 256 at a time.
        registers = warps * (-(-self.registers * 32 // 256) * 256)
        limits = [BLOCKS_PER_SM, WARPS_PER_SM // warps, REGISTERS_PER_SM // registers]
        if self.shared_bytes:
            limits.append(MAX_SHARED_BYTES // self.shared_bytes)
        return min(limits)

    def problems(self) -> Iterator[str]:
        """Yield what must not be, each as one line."""
        where = f"{self.header}: {self.entry.kernel}"
        if self.spill_bytes or self.stack_bytes:
            yield (
                f"{where} uses local memory: {self.spill_bytes} bytes of spills and "
                f"a stack of {self.stack_bytes} bytes, expected none; use fewer "
                "registers or a smaller tile, and index arrays with constants only"
            )
        if self.shared_bytes > MAX_SHARED_BYTES:
            yield (
                f"{where} needs {self.shared_bytes} bytes of shared memory; sm_70 "
                f"has {MAX_SHARED_BYTES}"
            )
        elif self.blocks_per_sm == 0:
            yield (
                f"{where} cannot be launched: {self.entry.threads} threads of "
                f"{self.registers} registers are more than sm_70 has; give the "
                "kernel its __launch_bounds__"
            )
        if self.entry.tensor_cores and self.hmma == 0:
            yield (
                f"{where} is listed as a tensor-core kernel, but no tensor-core "
                "instruction came out"
            )
        if self.hmma and not self.entry.tensor_cores:
            yield (
                f"{where} has {self.hmma} tensor-core instructions, but is not "
                "listed as a tensor-core kernel; correct its SM70_ENTRY"
            )


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_GLOBAL = re.compile(
    rf"__global__\s+(?:(?:void|static|__launch_bounds__\s*{_PARENTHESES})\s+)*"
    r"(\w+)\s*\("
)
# The variable that SM70_ENTRY makes, as bytes; trailing zeros are left out.
_PTX_ENTRY = re.compile(
    r"\.global \.align 4 \.b8 sm70_entry_\d+\[(\d+)\] = \{([^}]*)\};"
)
_PTXAS_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_PTXAS_LOCAL = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


def _code(path: Path) -> str:
    return _COMMENT.sub("", path.read_text())


def list_entries(ptx: str) -> list[Entry]:
    """Read the SM70_ENTRY lines of a header out of its PTX."""
    entries = []
    for length, values in _PTX_ENTRY.findall(ptx):
        data = bytes(map(int, values.split(","))).ljust(int(length), b"\0")
        threads, shared, tensor = struct.unpack_from("<3i", data)
        kernel = data[12:].split(b"\0")[0].decode()
        entries.append(Entry(kernel, threads, shared, bool(tensor)))
    return entries


def count_hmma(cubin: bytes, kernel: str) -> int:
    """Count the tensor-core instructions of a kernel in an sm_70 ELF file."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<3H", cubin, 58)
    sections = [
        struct.unpack_from("<IIQQQQ", cubin, sections_at + i * size)
        for i in range(count)
    ]
    names_at = sections[names_index][4]
    for name_offset, _, _, _, offset, length in sections:
        start = names_at + name_offset
        name = cubin[start : cubin.index(b"\0", start)]
        if name == f".text.{kernel}".encode():
            opcodes = (
                struct.unpack_from("<Q", cubin, at)[0] & 0xFFF
                for at in range(offset, offset + length, INSTRUCTION_BYTES)
            )
            return sum(opcode == HMMA_OPCODE for opcode in opcodes)
    raise CompileError(f"no code for {kernel} in the compiled file")


def _assemble(
    toolchain: Toolchain, ptx: str, keep: Path | None, stem: str
) -> tuple[str, bytes]:
    """Run ptxas; return its report and the compiled file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        ptx_path, cubin_path = folder / f"{stem}.ptx", folder / f"{stem}.cubin"
        ptx_path.write_text(ptx)
        done = subprocess.run(
            [toolchain.ptxas, "-arch=sm_70", "-v", ptx_path, "-o", cubin_path],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise CompileError(f"ptxas failed:\n{done.stderr}")
        return done.stderr, cubin_path.read_bytes()


def compile_header(
    toolchain: Toolchain, header: Path, keep: Path | None = None
) -> list[KernelReport]:
    """Compile every kernel that a header lists.

    Args:
        toolchain: from `fetch_toolchain`.
        header: a `.cuh` file; its folder is searched for its includes.
        keep: a folder for the PTX and the compiled file.

    Raises:
        CompileError: the header does not compile, lists no kernel, defines one
            that it does not list, or lists one twice.

    """
    nvrtc = Nvrtc(toolchain)
    source = f'#include "{header.name}"\n'
    try:
        ptx, _ = nvrtc.compile(source, header.parent)
        entries = list_entries(ptx)
        kernels = [entry.kernel for entry in entries]
        if not entries:
            raise CompileError(
                "lists no kernel; end it with SM70_ENTRY (see kernel_entry.h), or "
                "name it .h if it has none"
            )
        if len(set(kernels)) != len(kernels):
            raise CompileError("lists a kernel twice")
        code = _code(header)
        if re.search(r'#\s*include\s*["<][^">]*\.cuh[">]', code):
            raise CompileError(
                "includes another kernel header; move what both need to a .h file"
            )
        listed = {re.split("<", kernel)[0].split("::")[-1] for kernel in kernels}
        defined = _GLOBAL.findall(code)
        unreadable = [name for name in defined if name.startswith("__")]
        if unreadable or len(defined) != code.count("__global__"):
            raise CompileError(
                "has a __global__ whose name this program cannot read; write "
                "`__global__ void __launch_bounds__(n) name(params)`"
            )
        for kernel in defined:
            if kernel not in listed:
                raise CompileError(f"kernel {kernel} has no SM70_ENTRY")
        ptx, names = nvrtc.compile(source, header.parent, kernels)
        report, cubin = _assemble(toolchain, ptx, keep, header.stem)
    except CompileError as error:
        raise CompileError(f"{header.name}: {error}") from None

    # ptxas says for each kernel first its name, then a line for it and for each
    # function that was not inlined into it, then the registers.
    parts = _PTXAS_ENTRY.split(report)
    sections = dict(zip(parts[1::2], parts[2::2]))
    reports = []
    for entry in entries:
        section = sections[names[entry.kernel]]
        local = [tuple(map(int, m)) for m in _PTXAS_LOCAL.findall(section)]
        registers = re.search(r"Used (\d+) registers", section)
        shared = re.search(r"(\d+) bytes smem", section)
        assert registers is not None
        reports.append(
            KernelReport(
                header=header.name,
                entry=entry,
                registers=int(registers[1]),
                stack_bytes=sum(stack for stack, _, _ in local),
                spill_bytes=sum(stores + loads for _, stores, loads in local),
                static_shared_bytes=int(shared[1]) if shared else 0,
                hmma=count_hmma(cubin, names[entry.kernel]),
            )
        )
    return reports


def misplaced_kernels(sources: Path) -> Iterator[str]:
    """Yield a line for each file with a kernel that is no kernel header."""
    for path in sorted(sources.rglob("*")):
        if path.is_file() and path.suffix in {".h", ".hpp", ".cu", ".cpp"}:
            names = _GLOBAL.findall(_code(path))
            if names:
                yield (
                    f"{path.name}: kernel {names[0]} must be in a kernel header "
                    "(.cuh), where this program finds it"
                )


def table(reports: Iterable[KernelReport]) -> str:
    """Format reports for a terminal: bytes, and counts."""
    head = (
        "kernel",
        "threads",
        "regs",
        "spill B",
        "stack B",
        "shared B",
        "+ dynamic",
        "HMMA",
        "blocks/SM",
    )
    rows = [
        (
            report.entry.kernel.replace("vllm::sm70::", ""),
            str(report.entry.threads),
            str(report.registers),
            str(report.spill_bytes),
            str(report.stack_bytes),
            str(report.static_shared_bytes),
            str(report.entry.dynamic_shared_bytes),
            str(report.hmma),
            str(report.blocks_per_sm),
        )
        for report in reports
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = []
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def compile_all(
    toolchain: Toolchain, sources: Path, keep: Path | None = None
) -> tuple[list[KernelReport], list[str]]:
    """Compile every kernel header below `sources`.

    Returns:
        The reports of what compiled, and the problems; none is good.

    """
    reports: list[KernelReport] = []
    problems = list(misplaced_kernels(sources))
    headers = sorted(sources.rglob("*.cuh"))
    if not headers:
        problems.append(f"{sources}: no kernel header (*.cuh) there")
    for header in headers:
        try:
            reports += compile_header(toolchain, header, keep)
        except CompileError as error:
            problems.append(str(error))
    for report in reports:
        problems += report.problems()
    return reports, problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status: 0, 1 (problems) or 2 (no tools)."""
    parser = argparse.ArgumentParser(
        description="Compile every CUDA kernel of csrc/sm70 for sm_70."
    )
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--cache", type=Path, default=CACHE, help="for the compiler")
    parser.add_argument("--keep", type=Path, help="folder for the PTX and the cubins")
    options = parser.parse_args(arguments)
    try:
        toolchain = fetch_toolchain(options.cache)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 2
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    reports, problems = compile_all(toolchain, options.sources, options.keep)
    print(table(reports))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"sm_70: {len(reports)} kernels compiled, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
