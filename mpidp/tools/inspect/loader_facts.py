"""A described data set enters; what the loader will do with it leaves, one line each."""

from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.memory_budget import choose_mixing, choose_shuffle, default_node_bytes, first_batch_bytes
from mpidp.hdf5.order.order import Order
from mpidp.hdf5.read import decoding, slow_paths
from mpidp.tools.table import size_text
from mpidp.world.system import memory_limit

_GLOBAL_BATCH = 64


def loader_facts(found: DataSet) -> list[str]:
    """Return how one file with these fields is read by default on this machine."""
    (file,) = found.files
    lanes, mixing_chunks = choose_mixing(found, default_node_bytes(memory_limit()), None, None, _GLOBAL_BATCH)
    order = Order(found.chunk_rows, 0, lanes, mixing_chunks, _GLOBAL_BATCH, choose_shuffle(found))
    unit = "chunks" if file.chunked else "ranges (not chunked)"
    height = min(file.range_rows, found.num_rows)
    chunk_bytes = found.mean_chunk_bytes
    lines = [
        f"  samples   {found.num_rows} of {size_text(found.row_bytes)} in memory",
        f"  reading   {len(found.chunk_rows)} {unit} of {height} rows, {size_text(chunk_bytes)} in memory",
        f"  decoding  {decoding(found)}",
        *(f"  slow      {line}" for line in slow_paths(found)),
    ]
    if order.shuffle == "lanes":
        lines.append(f"  lanes     {lanes} by default, with {mixing_chunks} chunks of a lane mixed")
        lines.append(f"  memory    {size_text(mixing_chunks * chunk_bytes)} for those chunks of one lane")
    else:
        lines.append(f"  order     {order.shuffle} by default: samples are read one by one")
    first = size_text(first_batch_bytes(order, found))
    lines.append(f"  first     {first} are read, by all ranks together, before the first batch of {_GLOBAL_BATCH}")
    widened = [field for field in found.fields if field.dtype != field.stored]
    return lines + [f"  dtype     {field.name} is stored as {field.stored}, read as {field.dtype}" for field in widened]
