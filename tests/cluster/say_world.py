"""Started on every rank; rank 0 prints what each rank's World says, as one JSON list in the order of ranks."""

import json

import mpidp


def main() -> None:
    world = mpidp.init()
    names = ("rank", "size", "local_rank", "local_size", "node", "num_nodes", "host")
    worlds = world.comm.gather({name: getattr(world, name) for name in names})
    if world.rank == 0:
        print(json.dumps(worlds))


if __name__ == "__main__":
    main()
