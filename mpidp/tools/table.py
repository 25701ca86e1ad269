"""Rows of text enter, an aligned table leaves; and byte counts become readable."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Lay out rows under a header, columns two spaces apart; numbers to the right, text to the left."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for line in cells:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric or [False] * len(widths), strict=True)
        )
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Return a byte count with a binary unit and three digits or so: 812 B, 1.5 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.1f} {units[power]}"
