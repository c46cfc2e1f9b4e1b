"""Draws layers.svg, the README's picture: `python docs/images/layers.py`.

A Llama of 32 layers is compiled inside `graphs.dump`. Every square is one operation in the dump's
text of the graph, before and after the pass `outline_layers`.
"""

import re
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import graphs
from attn_ops.integrations import transformers as integration

NUM_LAYERS = 32
KINDS = {  # what an operation's text holds: name and colour
    r"_nn\.linear\(": ("matrix product", "#d97706"),
    r"attn_ops\.attention": ("attention", "#be123c"),
    r"index_put_\(": ("KV cache write", "#7c3aed"),
    r"self\.layer_\d+\(": ("call of the layer", "#15803d"),
    r"": ("other", "#94a3b8"),
}
SIZE, STEP, LEFT = 6, 8, 24


def dumped(directory: Path) -> tuple[list[str], list[str], list[str]]:
    """Operations of the whole graph before the pass, of the graph after it, and of one layer."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    integration.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops").eval()
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    with graphs.dump(directory):
        graphs.DecodeSession(compiled, max_batch_size=2, max_tokens=32).generate(
            [[1, 2, 3], [4, 5]], max_new_tokens=2
        )
    texts = {
        when: next(directory.glob(f"passes/*outline_layers-whole_model.{when}.py")).read_text()
        for when in ("before", "after")
    }
    main, layer = texts["after"].split("class layer_0", 1)
    return operations(texts["before"]), operations(main), operations(layer)


def operations(text: str) -> list[str]:
    """Right-hand sides of a printed graph, without its inputs and the items of results."""
    sides = re.findall(r"^ +\w+(?:: \"[^\"]*\")? = (\S.*)$", text, flags=re.MULTILINE)
    return [s for s in sides if not re.match(r"L_\w+\b|layer_\d+\[", s)]


def squares(lines: list[str], x: int, y: int, wrap: int = 10_000) -> str:
    """One path a colour, which keeps the file small."""
    drawn: dict[str, str] = {}
    for i, line in enumerate(lines):
        colour = next(c for pattern, (_, c) in KINDS.items() if re.search(pattern, line))
        corner = f"M{x + i % wrap * STEP} {y + i // wrap * STEP}"
        drawn[colour] = f"{drawn.get(colour, '')}{corner}h{SIZE}v{SIZE}h-{SIZE}z"
    return "\n".join(f'<path fill="{c}" d="{d}"/>' for c, d in drawn.items())


def words(text: str, x: int, y: int, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{text}</text>'


def picture(before: list[str], main: list[str], layer: list[str]) -> str:
    calls = [i for i, line in enumerate(main) if line.startswith("self.layer_0(")]
    first, behind = calls[0], len(main) - calls[-1] - 1
    assert len(calls) == NUM_LAYERS
    assert len(before) == first + NUM_LAYERS * len(layer) + behind
    rows = [before[first + i * len(layer) :][: len(layer)] for i in range(NUM_LAYERS)]
    parts, y = [], 56
    parts.append(
        words(f"Before: {len(before):,} operations, {NUM_LAYERS} equal layers", 24, 34, "bold")
    )
    for row in [before[:first], *rows, before[-behind:]]:
        parts.append(squares(row, LEFT, y))
        y += STEP
    y += 36
    after = f"After: {len(main)} operations, and one layer of {len(layer)}"
    parts.append(words(f"{after}, compiled once and called {NUM_LAYERS} times", 24, y, "bold"))
    parts.append(squares(main, LEFT, y + 18, wrap=len(layer)))
    parts.append(squares(layer, LEFT, y + 42))
    y, x = y + 78, LEFT
    for name, colour in KINDS.values():
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(words(name, x + 16, y))
        x += 36 + 7 * len(name)
    width, height = 2 * LEFT + STEP * max(len(layer), len(rows[0])), y + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
    style = 'font-family="Arial, DejaVu Sans, sans-serif" font-size="13" fill="#0f172a"'
    card = f'<rect width="{width}" height="{height}" rx="8" fill="#f8fafc"/>'
    return "\n".join([f"{head} {style}>", card, *parts, "</svg>", ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        drawn = picture(*dumped(Path(temporary) / "dump"))
    Path(__file__).with_suffix(".svg").write_text(drawn)
