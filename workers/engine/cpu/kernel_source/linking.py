"""Links relocatable objects into a kernel image: what a system linker would do, which no user's machine need have.

Knows the part of ELF for x86-64 that LLVM's code generator uses for the kernels, and refuses all else. Source: System V
Application Binary Interface, chapters 4 and 5, and its AMD64 supplement, table 4.9.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

# Sections: program bits and zeros; flag of those that are loaded. Symbols: undefined, common.
PROGBITS, RELA, NOBITS, ALLOC = 1, 4, 8, 2
UNDEFINED, COMMON = 0, 0xFFF2
# Relocations: the address in 8 bytes; the distance in 4 and in 8 bytes.
R_X86_64_64, R_X86_64_PC32, R_X86_64_PLT32, R_X86_64_PC64 = 1, 2, 4, 24
CACHE_LINE = 64


class LinkError(Exception):
    """An object needs what this linker does not have."""


class Linked(NamedTuple):
    """As in `kernel_image.KernelImage`; `functions` by the name of their symbol."""

    code: bytes
    functions: dict[str, int]
    pointers: list[tuple[int, int]]
    imports: dict[str, list[int]]


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    item_bytes: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int
    size: int


def link(objects: Mapping[str, bytes], allowed_imports: frozenset[str], never_called: frozenset[str]) -> Linked:
    """One image of relocatable ELF objects, each with the symbol that it is to provide.

    Args:
        objects: objects by symbol.
        allowed_imports: functions that the C library provides.
        never_called: symbols that only unreachable code uses; `abort` takes their place.

    Raises:
        LinkError: an object uses another symbol, or a relocation that is not known here.
    """
    code = bytearray()
    linked = Linked(b"", {}, [], {})
    for name, content in objects.items():
        _link_one(code, linked, name, content, allowed_imports, never_called)
    return linked._replace(code=bytes(code))


def _link_one(
    code: bytearray,
    linked: Linked,
    name: str,
    content: bytes,
    allowed_imports: frozenset[str],
    never_called: frozenset[str],
) -> None:
    if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", content, 16) != (1, 62):
        raise LinkError(f"{name} is no relocatable object for x86-64")
    (table_at,), (num_sections,) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<H", content, 60)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", content, table_at + 64 * i)) for i in range(num_sections)]
    places = {}
    for index, section in enumerate(sections):
        if section.kind in (PROGBITS, NOBITS) and section.flags & ALLOC:
            code += bytes(-len(code) % max(section.align, CACHE_LINE))
            places[index] = len(code)
            is_empty = section.kind == NOBITS
            code += bytes(section.size) if is_empty else content[section.offset : section.offset + section.size]
    symbols = _symbols(content, sections)
    for symbol_index, symbol in enumerate(symbols):
        if symbol.section == COMMON:  # its value is its alignment
            code += bytes(-len(code) % max(symbol.value, 8))
            sections.append(_Section(0, NOBITS, ALLOC, 0, 0, symbol.size, 0, 0, 8, 0))
            places[len(sections) - 1] = len(code)
            code += bytes(symbol.size)
            symbols[symbol_index] = symbol._replace(section=len(sections) - 1, value=0)
    for section in sections:
        if section.kind == RELA and section.info in places:
            for at in range(section.offset, section.offset + section.size, 24):
                offset, info, addend = struct.unpack_from("<QQq", content, at)
                symbol, kind, place = symbols[info >> 32], info & 0xFFFFFFFF, places[section.info] + offset
                if symbol.section in places:
                    target = places[symbol.section] + symbol.value + addend
                    if kind == R_X86_64_64:
                        linked.pointers.append((place, target))
                    elif kind in (R_X86_64_PC32, R_X86_64_PLT32):
                        struct.pack_into("<i", code, place, target - place)
                    elif kind == R_X86_64_PC64:
                        struct.pack_into("<q", code, place, target - place)
                    else:
                        raise LinkError(f"{name} has a relocation of type {kind}")
                elif symbol.section == UNDEFINED and kind == R_X86_64_64 and addend == 0:
                    used = "abort" if symbol.name in never_called else symbol.name
                    if used not in allowed_imports:
                        raise LinkError(f"{name} uses {used}")
                    linked.imports.setdefault(used, []).append(place)
                else:
                    raise LinkError(f"{name} has a relocation of type {kind} for {symbol.name or 'a section'}")
    found = next(symbol for symbol in symbols if symbol.name == name)
    linked.functions[name] = places[found.section] + found.value


def _symbols(content: bytes, sections: list[_Section]) -> list[_Symbol]:
    table = next(section for section in sections if section.kind == 2)
    names_at = sections[table.link].offset
    symbols = []
    for at in range(table.offset, table.offset + table.size, 24):
        name, _info, _other, section, value, size = struct.unpack_from("<IBBHQQ", content, at)
        end = content.index(b"\0", names_at + name)
        symbols.append(_Symbol(content[names_at + name : end].decode(), section, value, size))
    return symbols
