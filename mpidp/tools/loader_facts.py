"""A described data set enters; what the loader will do with it leaves, one line each."""

from mpidp.config import DataSection
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.lanes import automatic_lanes
from mpidp.tools.table import size_text


def loader_facts(found: DataSet) -> list[str]:
    """Return what is known of how one file with these fields is read by default."""
    (file,) = found.files
    mixing_chunks = DataSection().mixing_chunks
    lanes = automatic_lanes(found.num_rows, found.mean_chunk_bytes, mixing_chunks)
    unit = "chunks" if file.chunked else "ranges (not chunked)"
    height = min(file.range_rows, found.num_rows)
    chunk_bytes = found.mean_chunk_bytes
    lines = [
        f"  samples   {found.num_rows} of {size_text(found.row_bytes)} in memory",
        f"  reading   {len(found.chunk_rows)} {unit} of {height} rows, {size_text(chunk_bytes)} in memory",
        f"  lanes     {lanes} by default, with {mixing_chunks} chunks of a lane mixed",
        f"  memory    {size_text(mixing_chunks * chunk_bytes)} for those chunks of one lane",
    ]
    widened = [field for field in found.fields if field.dtype != field.stored]
    return lines + [f"  dtype     {field.name} is stored as {field.stored}, read as {field.dtype}" for field in widened]
