"""Write the tables of tools/flodl.lua anew, from the package's own: python scripts/make_dissector.py [--check].

With --check nothing is written, and the exit code is 1 where they are not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flodl_fast import protocol
from flodl_fast.jsonform import _by_name, member_name
from flodl_fast.layout import Shape, struct_of
from flodl_fast.messages import PAYLOADS

LUA = Path(__file__).resolve().parents[1] / "tools" / "flodl.lua"
BEGIN = "-- Made by scripts/make_dissector.py from flodl_fast/messages.py and protocol.py; not to be changed by hand.\n"
END = "-- End of what is made.\n"
NUMBERS = ("u8", "u16", "u32", "u64", "i32", "f32", "f64")


class Tables:
    """The structs, enums and fields that the messages are made of, as Lua text."""

    def __init__(self) -> None:
        self.structs: dict[str, str] = {}
        self.enums: dict[str, str] = {}
        self.fields: dict[str, dict[str, str]] = {}

    def type(self, shape: Shape, family: str, field: str) -> str:
        """A wire type, and on the way the filter field for each value in it."""
        if shape.op == "struct":
            return f'{{"struct", "{self.struct(shape, family)}"}}'
        if shape.op == "enum":
            name = shape.cls.__name__
            members = ", ".join(f'[{int(m)}] = "{member_name(m)}"' for m in shape.cls)
            self.enums[name] = f"{{{members}}}"
            self.field(family, field, f"enum {name}")
            return f'{{"enum", "{name}"}}'
        if shape.op in ("opt", "list"):
            return f'{{"{shape.op}", {self.type(shape.parts[0], family, field)}}}'
        if shape.op in ("tuple", "map"):
            ends = ("key", "value") if shape.op == "map" else range(len(shape.parts))
            parts = (
                self.type(part, family, f"{field}.{end}") for part, end in zip(shape.parts, ends, strict=True)
            )
            return f'{{"{shape.op}", {", ".join(parts)}}}'
        self.field(family, field, shape.op)
        return f'{{"fixed", {shape.size}}}' if shape.op == "fixed" else f'{{"{shape.op}"}}'

    def field(self, family: str, name: str, op: str) -> None:
        known = self.fields.setdefault(family, {}).setdefault(name, op)
        if known != op:
            raise SystemExit(f"{family}.{name} is {known} in one message and {op} in another")

    def body(self, shape: Shape, family: str) -> str:
        """The fields of a struct or variant in wire order."""
        return "".join(
            f'{{"{name}", {self.type(part, family, name)}{"" if since is None else f", {since.value!r}"}}}, '
            for name, part, since in zip(shape.names, shape.parts, shape.since, strict=True)
        ).rstrip(", ")

    def struct(self, shape: Shape, family: str) -> str:
        name = f"{shape.cls.__name__}@{family}"
        self.structs[name] = f"{{{self.body(shape, family)}}}"
        return name


def made() -> str:
    """The generated part of the dissector."""
    tables = Tables()
    families = []
    for family, (kind, union) in PAYLOADS.items():
        number = "nil" if kind is None else str(int(kind))
        prefix = family.lower()
        variants = _by_name(family, max(protocol.Revision))
        if None in variants:
            body = f'fields = {{{tables.body(struct_of(union), prefix)}}}'
        else:
            rows = "".join(
                f'\n    [{index}] = {{name = "{name}", fields = {{{tables.body(shape, prefix)}}}}},'
                for index, (name, shape) in enumerate(variants.items())
            )
            body = f"variants = {{{rows}\n  }}"
        families.append(f'FAMILIES["{family}"] = {{kind = {number}, prefix = "{prefix}", {body}}}\n')
    text = [BEGIN, "local NUMBERS = {\n"]
    for name, value in vars(protocol).items():
        if name.startswith("MAGIC_"):
            text.append(f"  {name} = 0x{value:08X},\n")
    for name in ("CONTROL_HEADER", "MUX_HEADER", "ROUND_HEADER", "MAC_SIZE", "MAX_PAYLOAD", "FRAME_CEILING"):
        text.append(f"  {name} = {getattr(protocol, name)},\n")
    text.append("}\n")
    text.append("local REVISIONS = {\n")
    for revision, versions in protocol.VERSIONS.items():
        numbers = ", ".join(f"{name} = {value}" for name, value in versions._asdict().items())
        text.append(f'  ["{revision.value}"] = {{{numbers}}},\n')
    text.append("}\n")
    for name, enum in (("MsgKind", protocol.MsgKind), ("MuxKind", protocol.MuxKind), ("RoundKind", protocol.RoundKind)):
        tables.enums[name] = "{" + ", ".join(f'[{int(m)}] = "{member_name(m)}"' for m in enum) + "}"
    text.append("local FAMILIES = {}\n")
    text += families
    text.append("local STRUCTS = {\n" + "".join(f'  ["{n}"] = {t},\n' for n, t in tables.structs.items()) + "}\n")
    text.append("local ENUMS = {\n" + "".join(f"  {n} = {t},\n" for n, t in tables.enums.items()) + "}\n")
    text.append("local FIELDS = {\n")
    for family, fields in tables.fields.items():
        text.append(f"  {family} = {{\n" + "".join(f'    ["{n}"] = "{op}",\n' for n, op in fields.items()) + "  },\n")
    text += ["}\n", END]
    return "".join(text)


def main() -> int:
    old = LUA.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    new = before + made() + rest.partition(END)[2]
    if new == old:
        return 0
    if "--check" in sys.argv[1:]:
        print("tools/flodl.lua is not up to date: python scripts/make_dissector.py", file=sys.stderr)
        return 1
    LUA.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
