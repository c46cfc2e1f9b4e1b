"""What a kernel does before `griddepcontrol.wait`, read from its PTX.

A path is followed from the entry until it waits. Every instruction that is met runs, or may run,
while kernels in front are still at work.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

WAIT = "griddepcontrol.wait"
TRIGGER = "griddepcontrol.launch_dependents"
_REGISTER = re.compile(r"%[A-Za-z_]\w*")
_PARAMETER = re.compile(r"\b\w+_param_(\d+)\b")
_ADDRESS = re.compile(r"\[\s*([^\]]*?)\s*\]")
_STORES = ("st.", "red.", "atom.", "multimem.")
_SPACES = (".param", ".shared", ".const", ".local")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, or a label (`op` is empty)."""

    predicate: str  # "@%p1"; empty: it always runs
    op: str
    operands: str
    label: str = ""


def instructions(ptx: str) -> list[Instruction]:
    """Those of the only entry, in order; inline assembly has several a line."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    found = []
    for statement in re.split(r"[;\n]", body[body.index("{") + 1 :]):
        text = statement.strip().lstrip("{").strip()
        while label := re.match(r"(\$\w+):", text):
            found.append(Instruction("", "", "", label.group(1)))
            text = text[label.end() :].strip()
        predicated = re.match(r"(@!?%\w+)\s+", text)
        predicate = predicated.group(1) if predicated else ""
        op, *operands = re.split(r"\s+", text[predicated.end() if predicated else 0 :], maxsplit=1)
        if op[:1].isalpha():
            found.append(Instruction(predicate, op, operands[0] if operands else ""))
    return found


def before_waiting(code: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that a path from the entry reaches without having waited."""
    places = {one.label: i for i, one in enumerate(code) if one.label}
    seen: set[int] = set()
    todo = [0]
    while todo:
        i = todo.pop()
        while i < len(code) and i not in seen:
            seen.add(i)
            one = code[i]
            if one.op.startswith("bra") or one.op.startswith("brx"):
                todo += [places[name] for name in re.findall(r"\$\w+", one.operands)]
                if not one.predicate:
                    break
            if one.op in ("ret", "exit", WAIT) and not one.predicate:
                break
            i += 1
    return [code[i] for i in sorted(seen) if code[i].op]


def parameters_of(code: Sequence[Instruction], registers: Collection[str]) -> set[int]:
    """The entry's parameters from which the registers are computed, loads from memory left out."""
    definitions: dict[str, list[Instruction]] = {}
    for one in code:
        vector = re.match(r"\{[^}]*\}", one.operands)
        for name in _REGISTER.findall(vector.group() if vector else one.operands.split(",")[0]):
            definitions.setdefault(name, []).append(one)
    found: set[int] = set()
    seen, todo = set(registers), list(registers)
    while todo:
        for one in definitions.get(todo.pop(), ()):
            found |= {int(n) for n in _PARAMETER.findall(one.operands)}
            if not touches_memory(one):
                more = set(_REGISTER.findall(one.operands)) - seen
                seen |= more
                todo += more
    return found


def touches_memory(one: Instruction) -> bool:
    """Whether it reads or writes what other kernels may see. Asking for a line changes nothing."""
    op = one.op
    if op.startswith("cp.async"):
        return "global" in op
    if op.startswith(("ld.", "ldu.", "ldmatrix", *_STORES)):
        return not any(space in op for space in _SPACES) and "matrix" not in op
    return op.startswith(("tensormap", "suld", "sust", "tex", "cp.reduce"))


def faults(ptx: str, pointers: Mapping[int, str], free: Collection[str]) -> list[str]:
    """What the kernel must not do before it waits; empty: it may be launched early.

    Args:
        ptx: of a module with one entry.
        pointers: names of the entry's parameters that are addresses, by place.
        free: of those whose memory no kernel of a step writes.
    """
    code = instructions(ptx)
    found = []
    for one in before_waiting(code):
        if one.op in ("ret", "exit"):
            found.append("it may end without waiting")
        elif one.op == TRIGGER:
            found.append("it lets the next kernel start before it has waited")
        elif touches_memory(one):
            address = " ".join(_ADDRESS.findall(one.operands))
            places = parameters_of(code, _REGISTER.findall(address))
            places |= {int(n) for n in _PARAMETER.findall(address)}
            names = sorted(pointers[n] for n in places & pointers.keys()) or ["an unknown address"]
            stores = one.op.startswith(_STORES)
            if stores or not set(names) <= set(free):
                verb = "writes" if stores else "reads"
                found.append(f"it {verb} {', '.join(names)} before it has waited")
    return sorted(set(found))
