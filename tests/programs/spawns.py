"""A program whose children import it again, as data loaders under "spawn" do."""

import multiprocessing


def square(x: int) -> int:
    return x * x


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
