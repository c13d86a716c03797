# SPDX-License-Identifier: Apache-2.0
"""The C compiler of the image `engine`: TCC, called with the command line that Triton writes for GCC.

For each signature of kernels, Triton compiles a small module of C, the launcher. TCC alone does not do three
things that these modules need:

- `-l:NAME` links the library NAME in the folder `lib` beside TCC. There is only `libcuda.so.1`, which is
  empty: at run time, the loader takes the library of the driver.
- The modules get a header that forbids an executable stack. Without it, glibc 2.41 and later refuse them.
- Headers of libc and Python come from the folder `include` alone, so that the image needs no packages for
  development. Its file `search.txt` lists the folders in it that are searched, before all others.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent / "tcc"
ELF = b"\x7fELF\x02\x01"
"""The beginning of 64-bit little-endian ELF files."""
PT_GNU_STACK = 0x6474E551
READ_WRITE = 6


def translate(arguments: list[str]) -> list[str]:
    """Return TCC's arguments for a command line of GCC.

    Raises:
        ValueError: a library is not in the image.
    """
    translated = []
    for argument in arguments:
        if not argument.startswith("-l"):
            translated.append(argument)
            continue
        library = HOME / "lib" / argument.removeprefix("-l:")
        if not library.is_file():
            raise ValueError(
                f"{argument}: the image has only a compiler for modules of Triton, without libraries; "
                "install gcc and set CC=gcc"
            )
        translated.append(str(library))
    # Symbols of libc and Python are resolved when a process loads the module: it has both.
    folders = (HOME / "include/search.txt").read_text().split()
    search = [f"-I{HOME / 'include' / folder}" for folder in folders]
    return [f"-B{HOME}", "-nostdlib", "-nostdinc", *search, *translated, str(HOME / "libtcc1.a")]


def forbid_executable_stack(path: Path) -> None:
    """Add a PT_GNU_STACK header to an ELF file that has none.

    The program headers move to the end of the file, because they have no room to grow.
    """
    content = bytearray(path.read_bytes())
    if content[: len(ELF)] != ELF:
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    headers = content[offset : offset + size * count]
    if any(struct.unpack_from("<I", headers, size * index)[0] == PT_GNU_STACK for index in range(count)):
        return
    content += bytes(-len(content) % 16)
    struct.pack_into("<Q", content, 32, len(content))
    struct.pack_into("<H", content, 56, count + 1)
    content += headers + struct.pack("<IIQQQQQQ", PT_GNU_STACK, READ_WRITE, 0, 0, 0, 0, 0, 16)
    path.write_bytes(content)


def main() -> None:
    arguments = sys.argv[1:]
    status = subprocess.call([str(HOME / "tcc"), *translate(arguments)])
    if status == 0 and "-shared" in arguments and "-o" in arguments:
        forbid_executable_stack(Path(arguments[arguments.index("-o") + 1]))
    sys.exit(status)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"cc: {error}")
