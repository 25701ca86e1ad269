"""A word with commas enters, as in --fields=x,y; names leave. One word, so that options may come in any order."""

from typing import Annotated

import tyro

Names = Annotated[
    tuple[str, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,NAME",
        instance_from_str=lambda words: tuple(words[0].split(",")),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda names: [",".join(names)],
    ),
]
